"""The KV events of an engine, kept as a state, and passed on to routers over HTTP."""
