"""``pdrelay doctor``: what two machines find out about the network between them, and what follows
from it.
"""
