"""What this router has let in, by key, for the other routers of the fleet."""

from dataclasses import dataclass


@dataclass(slots=True)
class KeyUsage:
    """What a key was let in with, since the router started."""

    requests: int = 0
    tokens: int = 0


def note_usage(usage: dict[str, KeyUsage], key: str, requests: int, tokens: int) -> None:
    """Count for a key, and for all together (the empty name).

    There are as many keys as the file of keys names.
    """
    for name in (key, ""):
        found = usage.get(name)
        if found is None:
            found = usage[name] = KeyUsage()
        found.requests += requests
        found.tokens += tokens
