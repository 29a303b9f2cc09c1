"""The forms of the log: lines for people, or one JSON object for each event."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from pdrelay_proxy.core.one_line import one_line

T = TypeVar("T")
_TIME: Final = "%Y-%m-%d %H:%M:%S"  # logging's
FACTS: Final = "facts"  # logger.info(line, extra={FACTS: {...}}): the line's facts, by name


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, and the event's facts or its
    message.

    With several workers, a line has its worker's number: ``worker``.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker: Mapping[str, object] = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        """Write a record; one with facts has no message, which would repeat them."""
        facts: object = getattr(record, FACTS, None)
        event = self._begin(record.created, record.levelname.lower(), record.name)
        event |= facts if isinstance(facts, dict) else {"message": record.getMessage()}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        # a line break in a value is escaped: no value can forge a line
        return json.dumps(event, default=str)

    def lines(
        self,
        at: float,
        name: str,
        events: Sequence[T],
        fields: Callable[[T], Mapping[str, object]],
        _text: object,
    ) -> list[str]:
        """Write events by their fields; ``at``: seconds since the epoch."""
        begin = self._begin(at, "info", name)
        return [json.dumps(begin | dict(fields(event)), default=str) for event in events]

    def _begin(self, at: float, level: str, name: str) -> dict[str, object]:
        stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        return {"time": stamp, "level": level, **self._worker, "logger": name}


class TextFormatter(logging.Formatter):
    """Lines for people.

    The time of day is formatted once a millisecond, and most of it once a second. With several
    workers, a line has its worker's number before the logger's name.
    """

    def __init__(self, worker: int | None = None) -> None:
        self._worker = "" if worker is None else f"worker {worker} "
        super().__init__(f"%(asctime)s %(levelname)s {self._worker}%(name)s %(message)s")
        self._at: int = -1  # milliseconds since the epoch
        self._second: int = -1  # the same in seconds
        self._date = self._time = ""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as logging does, which itself writes those with a traceback."""
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        text = one_line(record.getMessage())
        return f"{self.formatTime(record)} {record.levelname} {self._worker}{record.name} {text}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's)
        """Write the line before a traceback."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: ANN401, N802 (logging's)
        """Write a traceback.

        An exception's text may have line breaks: its lines are indented, so none looks like a
        record.
        """
        return super().formatException(ei).replace("\n", "\n  ")

    def lines(
        self, at: float, name: str, events: Sequence[T], _fields: object, text: Callable[[T], str]
    ) -> list[str]:
        """Write events as text; ``at``: seconds since the epoch."""
        begin = f"{self._stamp(at)} INFO {self._worker}{name} "
        return [begin + text(event) for event in events]

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 (logging's)
        """Write the time as logging does."""
        return self._stamp(record.created)

    def _stamp(self, at: float) -> str:
        now = int(at * 1000)
        if now != self._at:
            second = now // 1000
            if second != self._second:
                self._date = time.strftime(_TIME, time.localtime(second))
                self._second = second
            self._at = now
            self._time = f"{self._date},{now % 1000:03d}"
        return self._time
