"""Which engines there should be, by several sources, and what to change for that."""
