"""Which engines serve a request, and what follows when one of them fails."""
