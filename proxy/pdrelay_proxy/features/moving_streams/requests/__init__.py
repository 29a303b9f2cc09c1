"""The life of a stream that moves."""
