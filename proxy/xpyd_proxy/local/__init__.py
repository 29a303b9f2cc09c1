"""Engines and a router on one machine: what `xpyd up`, the examples and the end-to-end tests share."""
