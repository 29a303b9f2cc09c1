"""Several routers before the same engines: docs/several-routers.md."""
