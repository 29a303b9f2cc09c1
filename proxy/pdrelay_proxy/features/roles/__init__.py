"""Changes the roles of engines with the load: how many each role needs, and which one changes."""
