"""KV of earlier answers, which a prefill engine (P) reads from the prefix cache of a decode engine
(D).
"""
