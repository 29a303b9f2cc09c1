"""Where the router learns of engines: sources that features add, a store, operators."""
