"""``pdrelay prove``: a black-box suite against running engines, and its report (docs/prove.md)."""
