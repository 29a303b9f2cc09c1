"""What the engine publishes about its prefix cache, kept and passed on to routers that read it over
HTTP.
"""
