"""Parses untrusted input within bounds: heads, bodies, forms, origins, addresses."""
