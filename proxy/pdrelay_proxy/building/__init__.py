"""The parts of the composition root: what reaches engines, what serves requests, what runs beside
them, the routes.
"""
