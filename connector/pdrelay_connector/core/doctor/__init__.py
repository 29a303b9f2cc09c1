"""``pdrelay doctor``: measures the network between two machines, and diagnoses it."""
