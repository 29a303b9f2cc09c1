"""Pairs of engines: which cannot meet, and which way of their KV is faster."""

COMMAND = "show which prefill and decode engines work together at a running router"
