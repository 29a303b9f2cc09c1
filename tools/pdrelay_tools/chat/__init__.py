"""``pdrelay chat``: a conversation through a running router."""
