"""Subcommands of ``pdrelay``: the router itself, and those that talk to a running one."""
