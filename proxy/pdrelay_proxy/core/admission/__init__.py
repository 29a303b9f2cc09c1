"""Which requests are served now, which wait and which are refused."""
