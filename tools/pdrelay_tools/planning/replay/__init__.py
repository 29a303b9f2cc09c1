"""``pdrelay replay``: the router's policies over simulated engines, in virtual time.

Nothing here serves requests.
"""
