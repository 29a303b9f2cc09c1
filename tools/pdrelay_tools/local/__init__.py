"""Engines and a router on one machine: what `pdrelay up`, the examples and the end-to-end tests
share.
"""
