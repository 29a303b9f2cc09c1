"""What engines have cached, by the KV events that they publish: docs/kv-events.md."""
