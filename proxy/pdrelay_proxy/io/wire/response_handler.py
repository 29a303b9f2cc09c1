"""Delivers one engine response by callbacks, without a future or a task."""

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from pdrelay_proxy.errors import ConnectionStale, EngineError


class ResponseSource(Protocol):
    """The connection of a response."""

    @property
    def is_sent(self) -> bool:
        """Whether all of the request is on its way."""
        ...

    def pause_reading(self) -> None:
        """Pause reading: the engine has to wait."""
        ...

    def resume_reading(self) -> None:
        """Resume reading."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class ResponseHandler(ABC):
    """Receives one response, by callbacks inside the event loop's read.

    A subclass gets the head (``began``), each piece of the body (``arrived``), and once the end:
    ``end``, ``fail`` or ``crashed``, after which no call comes. None of them may wait or raise.
    """

    __slots__ = ("complete", "engine", "error", "opening", "source", "until_close")

    def __init__(self, engine: str) -> None:
        self.engine = engine  # its id, for errors
        self.complete = False
        # it ended with its connection, as one that broke off does
        self.until_close = False
        self.error: Exception | None = None
        self.source: ResponseSource | None = None  # since the request was sent
        self.opening: asyncio.Task[None] | None = None  # opens a connection for it

    @property
    def is_sent(self) -> bool:
        """Whether the engine has all of the request, or will have it in a moment."""
        return self.complete or (self.source is not None and self.source.is_sent)

    def hold(self) -> None:
        """Pause reading: the engine has to wait."""
        if self.source is not None:
            self.source.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        if self.source is not None:
            self.source.resume_reading()

    def drop(self) -> None:
        """Close the connection, or open none: the answer is not wanted, and no callback follows."""
        if self.error is None:
            self.error = EngineError(f"{self.engine} is not asked any more")
        if self.source is not None:
            self.source.abort()
        elif self.opening is not None:
            self.opening.cancel()

    @abstractmethod
    def began(self, status: int, content_type: bytes, load: bytes) -> None:
        """The head has come."""

    @abstractmethod
    def arrived(self, piece: bytes, *, last: bool = False) -> None:
        """A piece of the body has come; ``last``: no more will, and ``end`` follows at once."""

    def chunk_arrived(self, chunk: bytes, piece: bytes) -> None:  # noqa: ARG002 (for subclasses that pass it on)
        """A piece of the body has come as one chunk; ``chunk``: its bytes with the size."""
        self.arrived(piece)

    def arrived_whole(self, content_type: bytes, body: bytes) -> None:
        """All of an answer with status 200 has come at once."""
        self.began(200, content_type, b"")
        if body:
            self.arrived(body, last=True)
        self.ended()

    @abstractmethod
    def end(self) -> None:
        """The answer is complete; the connection may be put back."""

    @abstractmethod
    def fail(self, error: EngineError) -> None:
        """The answer broke off, or was given up; the connection is closed, or about to be."""

    @abstractmethod
    def crashed(self, bug: Exception) -> None:
        """A callback has raised, which is a bug; the connection is closed."""

    # Called by the connection

    def ended(self) -> None:
        """Note that the last byte has come."""
        if self.error is None:
            self.complete = True
            self.end()

    def failed(self, error: EngineError) -> None:
        """Note that nothing more will come. The first error counts."""
        if not self.complete and self.error is None:
            self.error = error
            self.fail(error)

    def broke_off(
        self, cause: BaseException | None = None, *, was_stale: bool = False, was_sent: bool = True
    ) -> None:
        """Note that the connection ended before the answer did.

        ``was_stale``: a reused connection, without a byte of an answer; ``was_sent``: the engine
        may have got the whole request.
        """
        if was_stale:
            text = f"{self.engine} closed an idle connection as a request came"
            error: EngineError = ConnectionStale(text, was_sent=was_sent)
        else:
            error = half_answer(self.engine)
        error.__cause__ = cause
        self.failed(error)

    def give_up(self, error: EngineError) -> None:
        """Close the connection and fail, unless the answer is complete."""
        if not self.complete and self.error is None:
            self.drop()
            self.error = error
            self.fail(error)


def half_answer(engine: str) -> EngineError:
    """Return the error for an answer whose end is missing."""
    return EngineError(f"{engine} broke off before its answer was complete")
