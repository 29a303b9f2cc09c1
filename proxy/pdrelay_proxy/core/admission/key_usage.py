"""The requests that this router has admitted, by key, for the other routers of the fleet."""

from dataclasses import dataclass


@dataclass(slots=True)
class KeyUsage:
    """A key's admitted requests and their tokens, since the router started."""

    requests: int = 0
    tokens: int = 0


def note_usage(usage: dict[str, KeyUsage], key: str, requests: int, tokens: int) -> None:
    """Count for a key, and for all together (the empty name).

    The file of keys limits the number of keys.
    """
    for name in (key, ""):
        key_usage = usage.get(name)
        if key_usage is None:
            key_usage = usage[name] = KeyUsage()
        key_usage.requests += requests
        key_usage.tokens += tokens
