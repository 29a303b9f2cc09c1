"""How the log looks: lines for people, or one JSON object for each event."""

import json
import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, TextIO

from xpyd_proxy.settings import LogFormat

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
FACTS: Final = "facts"  # logger.info(line, extra={FACTS: {...}}): what the line says, by name


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, and the facts of the event or its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record; what has facts has no message, for that would say the same again."""
        facts: object = getattr(record, FACTS, None)
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event |= facts if isinstance(facts, dict) else {"message": record.getMessage()}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)  # a line break in a value is escaped: no value can forge a line


class TextFormatter(logging.Formatter):
    """Lines for people. The time is written anew once a second, and its milliseconds for each line."""

    def __init__(self) -> None:
        super().__init__(_TEXT)
        self._written = -1, ""  # the last second, and how it is written

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as logging does; what comes with a traceback is left to it."""
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.name} {record.getMessage()}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 (logging's)
        """Write the time as logging does."""
        second = int(record.created)
        written, text = self._written
        if second != written:
            text = time.strftime(self.default_time_format, self.converter(second))
            self._written = second, text
        return f"{text},{int(record.msecs):03d}"


class Lines(logging.StreamHandler[TextIO]):
    """Writes a line at once, but those of a batch together: a system call costs as much as ten lines."""

    def __init__(self) -> None:
        super().__init__()
        self._batch: list[str] | None = None
        self._own = self.lock or threading.RLock()  # the one under which logging calls ``emit``

    def begin(self) -> None:
        """Keep what comes; what is kept already comes first."""
        with self._own:
            self._batch = self._batch or []

    def end(self) -> None:
        """Write it; what the stream raises is told as logging tells it, and stops nobody."""
        with self._own:
            batch, self._batch = self._batch, None
            if not batch:
                return
            try:
                self.stream.write("".join(batch))
                self.flush()
            except Exception:  # noqa: BLE001 (as logging does it)
                self.handleError(logging.makeLogRecord({"msg": "%d lines of a batch", "args": (len(batch),)}))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep it."""
        if self._batch is None:
            super().emit(record)
            return
        try:
            self._batch.append(self.format(record) + self.terminator)
        except Exception:  # noqa: BLE001 (as logging does it)
            self.handleError(record)


@contextmanager
def lines_together() -> Generator[None]:
    """Write the lines of a block in one go."""
    found = [handler for handler in logging.getLogger().handlers if isinstance(handler, Lines)]
    for handler in found:
        handler.begin()
    try:
        yield
    finally:
        for handler in found:
            handler.end()


def configure(level: str, form: LogFormat) -> None:
    """Send the log of this process to standard error, in one of the two forms."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # no line says them
    handler = Lines()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line, with an address, for every leg
