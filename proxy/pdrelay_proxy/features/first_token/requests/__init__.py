"""The life of a stream that begins with a prefill engine's token."""
