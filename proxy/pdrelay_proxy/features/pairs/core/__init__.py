"""What is known of pairs of engines."""
