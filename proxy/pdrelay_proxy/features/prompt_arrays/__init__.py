"""Each prompt of a request with several goes its own way: docs/router.md."""
