"""What the routers of a fleet tell each other in datagrams: one exchange, and three payloads."""
