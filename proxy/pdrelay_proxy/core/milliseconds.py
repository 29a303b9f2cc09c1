"""Milliseconds in words, for headers and logs."""

from typing import Final

# Short times, formatted once: formatting a float costs twice as much as rounding it to an int.
_TENTHS_MOST: Final = 1000
_TENTHS: Final = [f"{tenths // 10}.{tenths % 10}" for tenths in range(_TENTHS_MOST)]


def written_ms(ms: float) -> str:
    """Format milliseconds, 0 or more, with one decimal place."""
    try:
        return _TENTHS[int(ms * 10 + 0.5)]
    except IndexError:
        return "%.1f" % ms  # noqa: UP031 (compiled, an f-string with a format costs half as much again)
