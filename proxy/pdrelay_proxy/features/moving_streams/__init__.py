"""Streams go on at other decode engines while they run: docs/moving-streams.md."""
