"""Decisions: which engines exist, which to use, what to send them.

Pure: no clock, no socket, no log.
"""
