"""What the status page shows of a feature: a table and some sentences, in words."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeatureStatus:
    """One part of the page. Each row has a cell for each column.

    The first columns are words, and those behind them are numbers.
    """

    title: str
    state: str  # beside the title, in a few words
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    sentences: Sequence[str] = ()
    words: int = 1  # how many columns are words
    spare: int = 0  # how many of the last columns a small screen leaves out
