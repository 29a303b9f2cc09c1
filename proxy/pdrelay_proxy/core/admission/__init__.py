"""Who is served now, who waits and who is refused."""
