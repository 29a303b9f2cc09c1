"""The measured speeds of engines, the expected costs of a request, and the choice: pure."""
