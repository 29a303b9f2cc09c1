"""Subcommands of ``xpyd`` that talk to a running router."""
