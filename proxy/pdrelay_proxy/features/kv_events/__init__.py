"""Routing by the KV events that engines publish of their caches: docs/kv-events.md."""
