"""The prefill engine's worker writes blocks into the decode engine."""
