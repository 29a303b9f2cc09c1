"""Shows where the time of a request went: ``pdrelay why``, ``GET /requests/NAME``, and spans."""

COMMAND = "show where the time of one request went"
