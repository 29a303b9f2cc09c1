"""Everything that touches a socket, a file or the clock."""
