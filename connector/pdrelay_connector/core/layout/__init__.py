"""Where KV lies in memory, and which bytes of it travel: arithmetic without I/O."""
