"""Engines of one slice share requests: docs/cells.md."""
