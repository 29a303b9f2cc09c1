"""Clients that do not read: engines and places at the gate wait for them.

Linux has an option for it, TCP_USER_TIMEOUT (RFC 5482), which resets clients that read slowly, too:
where a client's window stays smaller than the kernel's next segment of up to 64 KiB, the time of
its probes goes on while it reads (tcp_probe_timer, tcp_ack_probe). So bytes that clients take are
counted here.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_CHECKS: Final = 10  # in the time that a client has
_AT_ONCE: Final = 256  # connections that are checked in one iteration of the loop


class AnswerReader(Protocol):
    """The connection of a client."""

    def bytes_taken(self) -> int | None:
        """Return how many bytes the client has taken; None: none is left for it."""
        ...

    def on_unread(self, seconds: float) -> None:
        """End it: the client has taken no byte for so many seconds."""
        ...


@dataclass(slots=True)
class _Progress:
    """Since when the client has taken so many bytes, and no more; on the loop's clock."""

    taken: int | None = None
    since: float = 0.0


class UnreadAnswers:
    """One for each listening port. All its connections are checked now and then, by one timer."""

    def __init__(self, timeout_s: float | None, on_timeout: Callable[[], None]) -> None:
        """``timeout_s``: seconds in which a client must take a byte, at least; None: no limit.

        ``on_timeout`` is called for each connection that is ended.
        """
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._progress: dict[AnswerReader, _Progress] = {}
        self._next: asyncio.Handle | None = None  # the next check, or the rest of one

    def enter(self, reader: AnswerReader) -> None:
        """Check this connection, too."""
        if self._timeout_s is None:
            return
        self._progress[reader] = _Progress()
        if self._next is None:
            self._wait(self._timeout_s)

    def leave(self, reader: AnswerReader) -> None:
        """Forget a connection that has ended."""
        self._progress.pop(reader, None)
        if not self._progress and self._next is not None:
            self._next.cancel()
            self._next = None

    def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(
            timeout_s / _CHECKS, lambda: self._check(tuple(self._progress), timeout_s)
        )

    def _check(self, readers: Sequence[AnswerReader], timeout_s: float) -> None:
        """Check some of them; the others have their turn when the loop has done other work."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for reader in readers[:_AT_ONCE]:
            progress = self._progress.get(reader)
            if progress is None:
                continue
            taken = reader.bytes_taken()
            if taken is None or taken != progress.taken:
                progress.taken = taken
                progress.since = now
            elif now - progress.since >= timeout_s:
                self._on_timeout()
                reader.on_unread(timeout_s)
        rest = readers[_AT_ONCE:]
        if rest:
            self._next = loop.call_soon(lambda: self._check(rest, timeout_s))
        elif self._progress:
            self._wait(timeout_s)
        else:
            self._next = None
