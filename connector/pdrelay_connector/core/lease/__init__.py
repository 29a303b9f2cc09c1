"""How long a prefill engine (P) keeps blocks for a decode engine (D), and what D knows of them."""
