"""What the router looks at beside the requests: whether engines live, what they are, and what their
counters say.
"""
