"""The router's HTTP as clients see it: bytes in, bytes out, errors as status codes."""
