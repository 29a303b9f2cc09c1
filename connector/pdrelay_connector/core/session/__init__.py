"""Connections between engines, and between a worker and its own scheduler: proofs, peers, links."""
