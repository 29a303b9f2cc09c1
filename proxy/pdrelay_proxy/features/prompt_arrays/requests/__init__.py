"""The life of a request with several prompts."""
