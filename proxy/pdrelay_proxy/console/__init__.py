"""What the commands of the router, of its features and of the tools share: a running router's
client, tables, flags.
"""
