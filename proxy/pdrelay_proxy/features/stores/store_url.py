"""The prefix in a store's URL, so that several fleets can share one Redis."""

import re
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

# no braces: they choose the slot of a Redis Cluster
_PREFIX: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_./:]{0,199}")


def split_prefix(url: str) -> tuple[str, str]:
    """Return a URL without ``prefix`` in its query, and the prefix; empty: there is none.

    Raises:
        ValueError: it has other characters than letters, digits and ``-_./:``, or more than 200.
    """
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    prefixes = [value for name, value in query if name == "prefix"]
    if not prefixes:
        return url, ""
    if len(prefixes) > 1 or not _PREFIX.fullmatch(prefixes[0]):
        raise ValueError(
            "a store's prefix is written once, in at most 200 letters, digits, '-', '_', '.', '/' "
            "and ':'"
        )
    rest = urlencode([(name, value) for name, value in query if name != "prefix"])
    base, _, _ = url.partition("?")
    return f"{base}?{rest}" if rest else base, prefixes[0]
