"""One answer, told to whoever sent the request as it comes: no future, no task, nobody who
waits.
"""

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from pdrelay_proxy.errors import ConnectionStale, EngineError


class ResponseSource(Protocol):
    """Where an answer comes from."""

    @property
    def is_sent(self) -> bool:
        """Tell whether all of the request is on its way."""
        ...

    def pause_reading(self) -> None:
        """Let the engine wait."""
        ...

    def resume_reading(self) -> None:
        """Go on."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class ResponseHandler(ABC):
    """What a connection tells about one answer, inside the event loop's read.

    A subclass is told of the head (``began``), of each piece of the body (``arrived``), and once of
    the end: ``ended`` or ``failed``, after which nothing more comes. None of them may wait or
    raise.
    """

    __slots__ = ("complete", "engine", "error", "opening", "source")

    def __init__(self, engine: str) -> None:
        self.engine = engine  # its id, for what errors say
        self.complete = False
        self.error: Exception | None = None
        self.source: ResponseSource | None = None  # since the request was sent
        self.opening: asyncio.Task[None] | None = None  # opens a connection for it

    @property
    def is_sent(self) -> bool:
        """Tell whether the engine has all of the request, or will have it in a moment."""
        return self.complete or (self.source is not None and self.source.is_sent)

    def hold(self) -> None:
        """Let the engine wait."""
        if self.source is not None:
            self.source.pause_reading()

    def go_on(self) -> None:
        """Go on."""
        if self.source is not None:
            self.source.resume_reading()

    def drop(self) -> None:
        """Close the connection, or open none: nobody wants the answer, and nothing more is told."""
        if self.error is None:
            self.error = EngineError(f"{self.engine} is not asked any more")
        if self.source is not None:
            self.source.abort()
        elif self.opening is not None:
            self.opening.cancel()

    @abstractmethod
    def began(self, status: int, content_type: bytes, load: bytes) -> None:
        """Its head is here."""

    @abstractmethod
    def arrived(self, piece: bytes, *, last: bool = False) -> None:
        """Some of its body is here; ``last``: no more will come, and ``end`` follows at once."""

    def chunk_arrived(self, chunk: bytes, piece: bytes) -> None:  # noqa: ARG002 (of use to who passes it on)
        """Some of its body is here, a chunk of its own; ``chunk``: the same as it has come, with
        its size.
        """
        self.arrived(piece)

    def arrived_whole(self, content_type: bytes, body: bytes) -> None:
        """All of an answer of status 200 has come at once."""
        self.began(200, content_type, b"")
        if body:
            self.arrived(body, last=True)
        self.ended()

    @abstractmethod
    def end(self) -> None:
        """All of it is here; the connection may be put back."""

    @abstractmethod
    def fail(self, error: EngineError) -> None:
        """It broke off, or was given up; the connection is closed, or about to be."""

    @abstractmethod
    def crashed(self, bug: Exception) -> None:
        """One of these calls has raised, which is a bug; the connection is closed."""

    # What the connection calls

    def ended(self) -> None:
        """Its last byte has come."""
        if self.error is None:
            self.complete = True
            self.end()

    def failed(self, error: EngineError) -> None:
        """Nothing more will come of it. The first error counts."""
        if not self.complete and self.error is None:
            self.error = error
            self.fail(error)

    def broke_off(
        self, cause: BaseException | None = None, *, was_stale: bool = False, was_sent: bool = True
    ) -> None:
        """Its connection ended before it did.

        ``was_stale``: one of before, without a byte of an answer; ``was_sent``: the engine may have
            had all of it.
        """
        if was_stale:
            said = f"{self.engine} closed an idle connection as a request came"
            error: EngineError = ConnectionStale(said, was_sent=was_sent)
        else:
            error = EngineError(f"{self.engine} broke off before its answer was complete")
        error.__cause__ = cause
        self.failed(error)

    def give_up(self, error: EngineError) -> None:
        """Close the connection, unless all has come."""
        if not self.complete and self.error is None:
            self.drop()
            self.error = error
            self.fail(error)
