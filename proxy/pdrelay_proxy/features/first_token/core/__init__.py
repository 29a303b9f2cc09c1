"""Which tokens a client may see, and the stream behind one."""
