"""Shared by the commands of the router, its features and the tools: the client of a running router,
tables, flags.
"""
