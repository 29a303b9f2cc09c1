"""Rows of text in columns: names to the left, numbers to the right."""

from collections.abc import Callable, Sequence


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad: Sequence[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return [
        "  ".join(fill(cell, width) for fill, cell, width in zip(pad, row, widths, strict=True))
        for row in rows
    ]
