"""Which engines there should be, as sources name them, and which are there: the difference is what
changes.
"""
