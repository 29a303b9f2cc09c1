"""Transfers of bytes between our memory and another engine's: what pull and push have in common."""
