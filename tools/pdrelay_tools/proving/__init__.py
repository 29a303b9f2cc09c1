"""``pdrelay prove``: a black-box suite against running engines, and one page of what it saw
(docs/prove.md).
"""
