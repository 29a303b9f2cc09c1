"""Values of flags, parsed and bounded: times, whole numbers, and URLs of servers."""

import argparse
import urllib.parse
from collections.abc import Callable
from typing import Final

from pdrelay_proxy.errors import ConfigError

_LONGEST_S: Final = 86_400.0


def seconds(text: str) -> float:
    """Parse a time, above 0 and at most a day."""
    value = _number(text)
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write seconds, above 0 and up to {_LONGEST_S:g}"
        )
    return value


def seconds_or_none(text: str) -> float:
    """Parse a time that may be 0."""
    value = _number(text)
    if not 0 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write seconds, from 0 to {_LONGEST_S:g}"
        )
    return value


def whole_number(what: str, least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers within bounds; ``what`` an error calls such a number."""

    def parse(text: str) -> int:
        is_short = len(text) <= len(str(most))
        if text.isascii() and text.isdigit() and is_short and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {what}: write one from {least} to {most:,}"
        )

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def server_url(text: str) -> str:
    """Return a URL without a slash at its end; raises ConfigError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
        parts = None
    if not is_good or parts is None or parts.username or parts.query or parts.fragment:
        raise ConfigError(
            f"{text!r} is not the URL of a server: write http://HOST:PORT, and keys in files"
        )
    return url.rstrip("/")
