"""Texts and tables for people at a terminal."""

from collections.abc import Sequence
from typing import Any, Final, cast

from pdrelay_proxy.core.one_line import one_line

_LONGEST: Final = 500  # characters of what a server said, in a sentence
# columns; a longer cell stands out, and no other is as wide: one server may have a million rows
_WIDEST: Final = 100


def printable(text: str) -> str:
    """Leave out what would move a terminal's cursor, but for line ends: words of engines and
    clients are in it.
    """
    return "".join([letter if letter.isprintable() or letter == "\n" else " " for letter in text])


def in_lines(found: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return an answer with no line break in any of its texts: one in a cell would look like a row
    of its own.
    """
    match found:
        case str():
            return one_line(found)
        case list():
            return [in_lines(each) for each in found]  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {
                one_line(name): in_lines(value)
                for name, value in cast("dict[str, Any]", found).items()
            }
        case _:
            return found


def shortened(text: str) -> str:
    """Cut what a server may have written at length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def widths_of(rows: Sequence[Sequence[str]]) -> Sequence[int]:
    """Return how wide columns are: as their widest cell, within reason."""
    return [min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows, of which the first one names the columns, with columns as wide as their widest
    cell.
    """
    widths = widths_of(rows)
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in lines)
