"""A client gets the prefill engine's token when that engine answers: docs/first-token.md."""
