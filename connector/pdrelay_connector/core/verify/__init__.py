"""Checksums of sampled blocks: taken where KV was computed, compared where it has arrived."""
