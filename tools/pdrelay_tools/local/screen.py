"""Plain lines of progress: rewritten in place on a terminal, one every few seconds in a pipe."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

PIPE_EVERY_S = 5.0
PIPE_WIDTH = 110  # columns
MARGIN = 12  # columns: two spaces and a label


class Screen:
    """Writes the progress of `pdrelay up`."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._width = shutil.get_terminal_size().columns if self._live else PIPE_WIDTH
        self._open = False  # the cursor is behind a line that may be rewritten
        self._next_s = PIPE_EVERY_S

    def line(self, text: str = "") -> None:
        """Write a whole line."""
        self._write("\n" * self._open + f"{text}\n")
        self._open = False

    def step(self, label: str, text: str) -> None:
        """Write a labelled text; all labels form a column, and so do all texts."""
        rows = textwrap.wrap(
            text, max(20, self._width - MARGIN), break_on_hyphens=False, break_long_words=False
        )
        for number, row in enumerate(rows or [""]):
            self.line(f"  {label if number == 0 else '':<{MARGIN - 2}}{row}")

    def waiting(self, names: Sequence[str], seconds: float) -> None:
        """Show which children do not serve yet."""
        self.progress("wait", f"{seconds:3.0f} s for {', '.join(names)}", seconds)

    def progress(self, label: str, text: str, seconds: float) -> None:
        """Show how far something is: at once on a terminal, now and then in a pipe."""
        text = f"  {label:<{MARGIN - 2}}{text}"
        if self._live:
            # a wrapped line could not be rewritten
            self._write(f"\r\x1b[K{text[: self._width - 1]}")
            self._open = True
        elif seconds >= self._next_s:
            self._write(f"{text}\n")
            self._next_s += PIPE_EVERY_S

    def done_waiting(self) -> None:
        """Erase the line of progress."""
        if self._open:
            self._write("\r\x1b[K")
        self._open = False
        self._next_s = PIPE_EVERY_S

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
