"""``pdrelay plan``: how many engines a traffic needs. Nothing here serves requests."""
