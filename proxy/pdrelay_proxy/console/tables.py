"""Texts and tables for people at a terminal."""

from collections.abc import Sequence
from typing import Any, Final, cast

from pdrelay_proxy.core.one_line import one_line

# columns; a longer cell sticks out without widening the others: a server may send a million rows
_WIDEST: Final = 100


def printable(text: str) -> str:
    """Replace characters that would move a terminal's cursor, except line ends: the text has words
    of engines and clients.
    """
    return "".join([letter if letter.isprintable() or letter == "\n" else " " for letter in text])


def in_lines(value_read: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return JSON without line breaks in its strings: one would look like a new row."""
    match value_read:
        case str():
            return one_line(value_read)
        case list():
            return [in_lines(item) for item in value_read]  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {
                one_line(name): in_lines(value)
                for name, value in cast("dict[str, Any]", value_read).items()
            }
        case _:
            return value_read


def widths_of(rows: Sequence[Sequence[str]]) -> Sequence[int]:
    """Return the widths of columns: of the widest cell, within a limit."""
    return [min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows, the first of which has the column names, with columns of equal widths."""
    widths = widths_of(rows)
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in lines)
