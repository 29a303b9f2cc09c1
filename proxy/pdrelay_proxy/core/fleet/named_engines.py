"""How messages name engines."""

from collections.abc import Sequence
from typing import Final

MOST_NAMED: Final = 16  # engines in one message


def listed(names: Sequence[str]) -> str:
    """Name the first of some engines; all of thousands would make errors of 100 kB."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
