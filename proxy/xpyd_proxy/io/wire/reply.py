"""One answer, while it arrives."""

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Protocol

from xpyd_proxy.errors import EngineError, EngineTimeout

UNREAD_MOST: Final = 256 * 1024  # bytes that wait for their reader before the engine has to wait


class Source(Protocol):
    """Where an answer comes from, as far as its reader has a say in it."""

    def pause_reading(self) -> None:
        """Let the engine wait."""
        ...

    def resume_reading(self) -> None:
        """Go on."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class Until(IntEnum):
    """What somebody waits for."""

    HEAD = 0
    MORE = 1
    END = 2


class Reply:
    """Collects an answer for one reader, who waits on a future only when there is nothing to read.

    ``most`` bounds the bytes of an answer that is read as a whole. Without it the answer is read as it comes, and the
    engine has to wait when more than 256 KiB are unread.
    """

    __slots__ = (
        "_held_up",
        "_most",
        "_on_hold",
        "_pieces",
        "_sink",
        "_size",
        "_until",
        "_waiter",
        "begun",
        "complete",
        "content_type",
        "engine",
        "error",
        "load",
        "source",
        "status",
    )

    def __init__(self, engine: str, source: Source, *, most: int | None = None) -> None:
        self.engine = engine
        self.source = source
        self.status = 0
        self.content_type = b""
        self.load = b""
        self.begun = self.complete = False
        self.error: Exception | None = None
        self._most = most
        self._pieces: list[bytes] = []
        self._size = 0  # of those pieces
        self._held_up = False  # by what waits for its reader
        self._on_hold = False  # by its reader
        self._sink: Callable[[bytes], object] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._until = Until.HEAD

    # What happens to it, told by the connection

    def began(self, status: int, content_type: bytes, load: bytes) -> None:
        """Its head has come."""
        self.status, self.content_type, self.load = status, content_type, load
        self.begun = True
        self._wake(Until.HEAD)

    def arrived(self, piece: bytes, *, last: bool = False) -> None:
        """Some of its body has come; ``last``: no more will."""
        if self._sink is not None:
            self._pour(self._sink, piece)
            return
        self._pieces.append(piece)
        self._size += len(piece)
        if self._most is None:
            if self._size > UNREAD_MOST and not self._held_up and not last:
                self._held_up = True
                self.source.pause_reading()
        elif self._size > self._most:
            self._pieces.clear()
            self.give_up(EngineError(f"{self.engine} answered with more than {self._most} bytes"))
        self._wake(Until.MORE)

    def ended(self) -> None:
        """Its last byte has come."""
        self.complete = self.error is None
        self._wake(Until.END)

    def failed(self, error: Exception) -> None:
        """Nothing more will come of it; what has come can still be read. The first error counts."""
        if not self.complete and self.error is None:
            self.error = error
            self._wake(Until.END)

    def broke_off(self, cause: BaseException | None = None) -> None:
        """Its connection ended before it did."""
        error = EngineError(f"{self.engine} broke off before its answer was complete")
        error.__cause__ = cause
        self.failed(error)

    def crashed(self, bug: Exception) -> None:
        """Give the reader what went wrong in taking it in."""
        self.give_up(bug)

    def out_of_time(self, seconds: float) -> None:
        """Nobody waits any longer."""
        self.give_up(EngineTimeout(f"{self.engine} did not answer within {seconds:g} s"))

    def give_up(self, error: Exception) -> None:
        """Close the connection, unless all has come: the error is what its reader gets."""
        if not self.complete and self.error is None:
            self.failed(error)
            self.source.abort()

    # What its reader does

    async def head(self) -> None:
        """Wait for the head; raises EngineError."""
        while not self.begun:
            self._check()
            await self._wait(Until.HEAD)

    async def whole(self) -> bytes:
        """Wait for the end, and return the body; raises EngineError or EngineTimeout."""
        while not self.complete:
            self._check()
            await self._wait(Until.END)
        return self._take()

    async def more(self) -> bytes:
        """Return all that has come, or wait for more; empty at the end. Raises EngineError after what came before."""
        while not self._pieces:
            if self.complete:
                return b""
            self._check()
            await self._wait(Until.MORE)
        return self._take()

    def hold(self) -> None:
        """Let the engine wait until ``go_on``, whatever is read."""
        self._on_hold = True
        self.source.pause_reading()

    def go_on(self) -> None:
        """Go on, unless too much waits for its reader."""
        self._on_hold = False
        if not self._held_up:
            self.source.resume_reading()

    async def deliver(self, sink: Callable[[bytes], object]) -> None:
        """Hand what has come, and what comes from now on, to ``sink``; return at the end, or raise as ``more`` does."""
        if self._pieces:
            sink(self._take())
        self._sink = sink
        try:
            while not self.complete:
                self._check()
                await self._wait(Until.END)
        finally:
            self._sink = None

    def _check(self) -> None:
        error = self.error
        if error is None:
            return
        self.error = EngineError(f"{self.engine} has failed already")
        try:
            raise error
        finally:
            del error  # its traceback holds this frame and this reply, which would wait for the garbage collector

    def _take(self) -> bytes:
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces, self._size = [], 0
        if self._held_up:
            self._held_up = False
            if not self._on_hold:
                self.source.resume_reading()
        return body

    def _pour(self, sink: Callable[[bytes], object], piece: bytes) -> None:
        try:
            sink(piece)
        except Exception as exc:  # noqa: BLE001 (the sink's own fault, whatever it is, goes to who gave it)
            self.give_up(exc)

    async def _wait(self, until: Until) -> None:
        self._until = until
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self, reached: Until) -> None:
        waiter = self._waiter
        if waiter is not None and reached >= self._until and not waiter.done():
            waiter.set_result(None)
