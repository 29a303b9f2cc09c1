"""The end of the log: a thread writes its lines, so that neither a full pipe nor a full disk stops
a request.

The queue before it is bounded. Lines that find it full, or that the system does not take, are
dropped and counted; one line says so once the lines before it are written.
"""

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

QUEUE_MOST: Final = 4 * 1024 * 1024  # characters in the queue: some ten thousand lines
CLOSE_S: Final = 2.0  # seconds to write the lines that are left at the end
_WRITE_MOST: Final = 64 * 1024  # bytes of one write: the capacity of a pipe
_BUSY_S: Final = 1.0  # seconds to wait for a descriptor that takes nothing now
logger = logging.getLogger(__name__)

# bytes that a pipe takes without waiting if ``select`` calls it writable (POSIX)
_AT_ONCE: Final = select.PIPE_BUF
# writes some of the bytes, and returns how many; raises OSError
Write = Callable[[memoryview], int]


class LogWriter:
    """A text stream that never waits and never raises. Its thread starts with the first line."""

    def __init__(self, write: Write, *, most: int = QUEUE_MOST, close_s: float = CLOSE_S) -> None:
        """``write``: may block for any time; ``most``: characters that may wait for it."""
        self._write = write
        self._most = most
        self._close_s = close_s
        self._news = threading.Condition()
        self._lines: deque[str] = deque()
        self._size = 0  # characters in the queue and of the present write
        self._thread: threading.Thread | None = None
        self._is_at_line = True  # the last write ended with a line
        self._reported = 0  # dropped lines that the log has reported
        self.dropped = 0  # lines, ever

    @classmethod
    def to(cls, descriptor: int) -> "LogWriter":
        """Write to a descriptor, blocking or not."""

        def write(data: memoryview) -> int:
            try:
                return os.write(descriptor, data)
            except BlockingIOError:
                select.select((), (descriptor,), (), _BUSY_S)
                return 0

        return cls(write)

    def write(self, text: str) -> int:
        """Queue some lines, or drop them."""
        with self._news:
            if self._size + len(text) > self._most:
                self.dropped += text.count("\n")
                return len(text)
            self._lines.append(text)
            self._size += len(text)
            if self._thread is None:
                self._begin()
            self._news.notify_all()
        return len(text)

    def _begin(self) -> None:
        """Start the thread; if the system allows no more threads now, the next line tries again."""
        thread = threading.Thread(target=self._run, name="pdrelay-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._thread = thread

    def flush(self) -> None:
        """Do not wait: ``close`` does."""

    def close(self) -> None:
        """Wait until the queued lines are written, at most ``close_s`` seconds."""
        with self._news:
            self._news.wait_for(lambda: not self._size, self._close_s)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: bool(self._lines))
                text = "".join(self._lines)
                self._lines.clear()
            is_written = self._write_all(text)
            with self._news:
                self._size -= len(text)
                dropped = self.dropped
                is_idle = not self._lines
                self._news.notify_all()
            if is_written and is_idle and dropped > self._reported:
                count = dropped - self._reported
                self._reported = dropped
                logger.warning(
                    "%d lines of the log were dropped: its reader, or its disk, did not take them",
                    count,
                )

    def _write_all(self, text: str) -> bool:
        """Write some lines; False: the system does not take them."""
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        if not self._is_at_line:
            data = memoryview(b"\n" + data)
        while data:
            try:
                written = self._write(data[:_WRITE_MOST])
            except OSError:
                # the disk is full, or the other end of the pipe is closed: there is nowhere to
                # report it
                with self._news:
                    self.dropped += bytes(data).count(b"\n")
                return False
            if written:
                self._is_at_line = data[written - 1] == ord("\n")
            data = data[written:]
        return True


class PromptWriter:
    """A text stream without a thread, for a process that forks: it drops what its descriptor does
    not take at once.
    """

    def __init__(self, write: Write) -> None:
        """``write``: does not wait, and raises BlockingIOError instead."""
        self._write = write

    @classmethod
    def to(cls, descriptor: int) -> "PromptWriter":
        """Write to a descriptor, blocking or not."""

        def write(data: memoryview) -> int:
            _, is_writable, _ = select.select((), (descriptor,), (), 0)
            if not is_writable:
                raise BlockingIOError
            return os.write(descriptor, data)

        return cls(write)

    def write(self, text: str) -> int:
        """Write some lines, or drop them."""
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while data:
                data = data[self._write(data[:_AT_ONCE]) :]
        except OSError:
            pass  # no reader, or a full disk: there is nowhere to report it
        return len(text)

    def flush(self) -> None:
        """Do nothing: all is written."""
