"""What tells it."""
