"""What strangers send, read within bounds: heads, bodies, forms, origins, addresses."""
