"""The decode engine's worker reads blocks from the prefill engine."""
