"""Ways to choose the engine of one leg. docs/routing.md ("Policies of your own") lists what another
one needs.
"""
