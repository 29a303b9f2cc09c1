"""The form of the log: lines for people, or one JSON object for each event."""

import io
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, TextIO, TypeVar

from pdrelay_proxy.core.one_line import one_line
from pdrelay_proxy.io.log_writer import LogWriter, PromptWriter
from pdrelay_proxy.settings import LogFormat

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


_OURS: Final = JsonFormatter, TextFormatter


def note(
    logger: logging.Logger,
    event: T,
    fields: Callable[[T], Mapping[str, object]],
    text: Callable[[T], str],
) -> None:
    """Log an event at level INFO: its fields in JSON, or its text for people; only one of them is
    built.

    With the handler of ``configure``, the line is written without a LogRecord, which costs more
    than all the rest.
    """
    note_all(logger, (event,), fields, text)


def note_all(
    logger: logging.Logger,
    events: Sequence[T],
    fields: Callable[[T], Mapping[str, object]],
    text: Callable[[T], str],
) -> None:
    """Log some events of the same moment, as ``note`` does."""
    handler = _only_handler(logger)
    if handler is not None:
        handler.write(logger.name, events, fields, text)
        return
    for event in events:
        record = logger.makeRecord(
            logger.name,
            logging.INFO,
            __file__,
            0,
            _Line(event, text),
            (),
            None,
            func=note.__name__,
            extra={FACTS: fields(event)},
        )
        logger.handle(record)


@dataclass(frozen=True, slots=True)
class _Line(Generic[T]):
    """An event's text, built only if a handler needs it: JSON never does."""

    event: T
    text: Callable[[T], str]

    def __str__(self) -> str:
        return self.text(self.event)


def _only_handler(logger: logging.Logger) -> "BatchingHandler | None":
    """Return this process's handler, if records go nowhere else and nothing filters them."""
    handlers = logger.root.handlers
    handler = handlers[0] if len(handlers) == 1 else None
    if (
        not isinstance(handler, BatchingHandler)
        or handler.filters
        or handler.level > logging.INFO
        or logger.root.filters
    ):
        return None
    at: logging.Logger | None = logger
    while at is not None and at is not logger.root:
        if at.handlers or at.filters or not at.propagate:
            return None
        at = at.parent
    return handler


class BatchingHandler(logging.StreamHandler[TextIO | LogWriter | PromptWriter]):
    """Writes the lines of a batch together: a system call costs as much as ten lines."""

    def __init__(self, stream: TextIO | LogWriter | PromptWriter | None = None) -> None:
        super().__init__(sys.stderr if stream is None else stream)
        self._batch: list[str] | None = None
        self._own = self.lock or threading.RLock()  # the one under which logging calls ``emit``

    def begin(self) -> None:
        """Begin a batch; one that is open goes on."""
        with self._own:
            self._batch = self._batch or []

    def end(self) -> None:
        """Write the batch; an error of the stream goes to ``handleError``, and stops nothing."""
        with self._own:
            batch = self._batch
            self._batch = None
            if not batch:
                return
            try:
                self.stream.write("".join(batch))
                self.flush()
            except Exception:  # noqa: BLE001 (as logging does it)
                self.handleError(
                    logging.makeLogRecord({"msg": "%d lines of a batch", "args": (len(batch),)})
                )

    def write(
        self,
        name: str,
        events: Sequence[T],
        fields: Callable[[T], Mapping[str, object]],
        text: Callable[[T], str],
    ) -> None:
        """Write events, or add their lines to the batch."""
        formatter = self.formatter
        assert isinstance(formatter, _OURS)
        now = time.time()  # noqa: TID251 (a log has the time of day)
        lines = self.terminator.join([*formatter.lines(now, name, events, fields, text), ""])
        with self._own:
            if self._batch is not None:
                self._batch.append(lines)
                return
            try:
                self.stream.write(lines)
                self.flush()
            except Exception:  # noqa: BLE001 (as logging does it)
                self.handleError(logging.makeLogRecord({"msg": lines}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's)
        """Report a line that could not be built in the log: standard error may be closed."""
        if isinstance(self.stream, LogWriter):
            self.stream.write(
                f"a line of {record.name} could not be written:\n{traceback.format_exc()}"
            )
        else:
            super().handleError(record)

    def close(self) -> None:
        """Wait until the lines are written, within a bound."""
        if isinstance(self.stream, LogWriter):
            self.stream.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or add it to the batch."""
        if self._batch is None:
            super().emit(record)
            return
        try:
            self._batch.append(self.format(record) + self.terminator)
        except Exception:  # noqa: BLE001 (as logging does it)
            self.handleError(record)


@contextmanager
def lines_together() -> Generator[None]:
    """Write the lines of a block as one batch."""
    handlers = [
        handler for handler in logging.getLogger().handlers if isinstance(handler, BatchingHandler)
    ]
    for handler in handlers:
        handler.begin()
    try:
        yield
    finally:
        for handler in handlers:
            handler.end()


def dropped_lines() -> int:
    """Return how many lines of this process's log were dropped."""
    streams = [
        handler.stream
        for handler in logging.getLogger().handlers
        if isinstance(handler, BatchingHandler)
    ]
    return sum(stream.dropped for stream in streams if isinstance(stream, LogWriter))


def configure(
    level: str, form: LogFormat, *, has_thread: bool = True, worker: int | None = None
) -> None:
    """Send the log of this process to standard error, in one of the two forms.

    ``has_thread``: a thread writes it; a process that forks has none, and drops what its reader
    does not take at once. ``worker``: the number of this process, if it is one of several workers.
    """
    # no line shows them
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.captureWarnings(capture=True)
    handler = BatchingHandler(_standard_error(LogWriter if has_thread else PromptWriter))
    handler.setFormatter(JsonFormatter(worker) if form is LogFormat.JSON else TextFormatter(worker))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # it logs a line, with an address, for every leg
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # the router logs its address and its end itself
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _standard_error(writer: type[LogWriter | PromptWriter]) -> TextIO | LogWriter | PromptWriter:
    """Return what the log is written to."""
    # started without standard error: a socket may have descriptor 2 now
    if sys.stderr is None:
        return writer(_refuse)
    try:
        return writer.to(sys.stderr.fileno())
    except (OSError, io.UnsupportedOperation):  # not a descriptor, as in a test
        return sys.stderr


def _refuse(_data: memoryview) -> int:
    raise OSError("there is no standard error")
