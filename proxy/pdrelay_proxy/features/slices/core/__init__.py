"""Pure: which slices share the traffic, and how."""
