"""Lines of requests on their way into the log: as text, without a record for each, and many in one go."""

import time
from typing import Final

_FORMAT: Final = "%Y-%m-%d %H:%M:%S"  # logging's


class Stamp:
    """The time of day at the beginning of a line, written anew once a millisecond, and most of it once a second."""

    __slots__ = ("_at", "_begin", "_second", "_text")

    def __init__(self) -> None:
        self._at: int = -1  # milliseconds since the epoch
        self._second: int = -1  # the same in seconds
        self._begin = self._text = ""

    def text(self, at: float) -> str:
        """Write a time, in seconds since the epoch, as logging does."""
        now = int(at * 1000)
        if now != self._at:
            second = now // 1000
            if second != self._second:
                self._begin = time.strftime(_FORMAT, time.localtime(second))
                self._second = second
            self._at, self._text = now, f"{self._begin},{now % 1000:03d}"
        return self._text


class Sheet:
    """Takes the lines of a batch, while the log is such that nothing but their text comes of them.

    Each looks as ``TextFormatter`` writes it, and ends as logging ends lines unless told otherwise.
    """

    __slots__ = ("_lines", "_stamp")

    def __init__(self) -> None:
        self._lines: list[str] | None = None
        self._stamp = Stamp()

    @property
    def is_open(self) -> bool:
        """Tell whether it takes lines now."""
        return self._lines is not None

    def open(self, lines: list[str]) -> None:
        """Put what comes behind these lines."""
        self._lines = lines

    def close(self) -> None:
        """Take no more."""
        self._lines = None

    def add(self, name: str, line: str) -> None:
        """Take a line of the logger of this name, at level INFO; nothing if the sheet is closed."""
        lines = self._lines
        if lines is not None:
            at = self._stamp.text(time.time())  # noqa: TID251 (what a log says is the time of day)
            lines.append(f"{at} INFO {name} {line}\n")
