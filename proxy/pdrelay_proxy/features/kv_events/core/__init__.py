"""What is remembered of engines' caches, and how a prompt is looked up there: no clock, no
socket.
"""
