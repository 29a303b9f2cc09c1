"""The datagrams between the routers of a fleet: one exchange, and three payloads."""
