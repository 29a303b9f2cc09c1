"""Ways to choose the engine of one leg. Adding one means adding a file and a line in io/request_path/policies.py."""
