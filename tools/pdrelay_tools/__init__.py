"""Commands beside the router, which never imports them: they try it, examine engines and plan
fleets.
"""
