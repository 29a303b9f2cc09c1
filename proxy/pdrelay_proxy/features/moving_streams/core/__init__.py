"""Pure: which streams should leave, and what their engines are for the others."""
