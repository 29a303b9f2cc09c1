"""Engines change between prefill and decode with the load: how many each role needs, and which one
turns.
"""
