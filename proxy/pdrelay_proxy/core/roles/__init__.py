"""How many engines each role needs, and which engine should turn."""
