"""The composition root in parts: engines, requests, background work, discovery, routes."""
