"""Texts and tables for people at a terminal."""

from collections.abc import Sequence
from typing import Final

_LONGEST: Final = 500  # characters of what a server said, in a sentence


def printable(text: str) -> str:
    """Leave out what would move a terminal's cursor, but for line ends: words of engines and clients are in it."""
    return "".join([letter if letter.isprintable() or letter == "\n" else " " for letter in text])


def shortened(text: str) -> str:
    """Cut what a server may have written at length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows, of which the first one names the columns, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)
