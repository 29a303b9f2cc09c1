"""Where the time of a request went: ``pdrelay why``, ``GET /requests/NAME``, and spans for a
collector.
"""

COMMAND = "show where the time of one request went"
