"""Decisions: which engines exist, which to use, what to ask them.

Pure: no clock, no socket, no log.
"""
