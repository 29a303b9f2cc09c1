"""KV of earlier answers, which a prefill engine (P) reads from a decode engine's (D's) cache."""
