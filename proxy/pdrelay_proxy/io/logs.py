"""Writes the log of this process: events without a LogRecord for each, many lines at a time."""

import io
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TextIO, TypeVar

from pdrelay_proxy.io.log_formats import FACTS, JsonFormatter, TextFormatter
from pdrelay_proxy.io.log_writer import LogWriter, PromptWriter
from pdrelay_proxy.settings import LogFormat

T = TypeVar("T")
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
            if batch:
                self._put("".join(batch), msg="%d lines of a batch", args=(len(batch),))

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
            else:
                self._put(lines, msg=lines)

    def _put(self, text: str, **described: object) -> None:
        """Write a text; ``described``: attributes of the record that an error names."""
        try:
            self.stream.write(text)
            self.flush()
        except Exception:  # noqa: BLE001 (as logging does it)
            self.handleError(logging.makeLogRecord(described))

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
