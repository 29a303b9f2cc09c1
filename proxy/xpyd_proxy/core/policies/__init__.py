"""Ways to choose engines. Adding one means adding a file and a line in app.py."""
