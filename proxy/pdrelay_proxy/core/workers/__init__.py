"""What the worker processes of one router agree on."""
