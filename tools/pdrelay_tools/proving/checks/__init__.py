"""The checks, by what they try; ``suite.py`` lists them."""
