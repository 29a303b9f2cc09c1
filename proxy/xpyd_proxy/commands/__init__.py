"""Subcommands of ``xpyd``: the router itself, and those that talk to a running one."""
