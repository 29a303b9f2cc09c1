"""The gate before the first leg: waits until a request is admitted, and gives its place back when it is over."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Final, TypeAlias

from xpyd_proxy.core.admission import Admission, State, Ticket
from xpyd_proxy.core.limits import Limit, Limits, Refusal
from xpyd_proxy.errors import KeyOverLimit, RouterFull

Turn: TypeAlias = AbstractAsyncContextManager[None]  # entered when it is a request's turn, left when it is over
_NONE: Final = Limits()


class Gate:
    """One for the router, on its one event loop."""

    def __init__(self, limits: Limits = _NONE, clock: Callable[[], float] = time.monotonic) -> None:
        self.admission = Admission(limits)  # its counts are for whoever watches
        self._clock = clock
        self._woken: dict[Ticket, asyncio.Event] = {}  # of those that wait
        self._watching: dict[Ticket, Callable[[], None]] = {}  # the same, and what to call

    def admitted(self, key: str, priority: int, size: int) -> Turn:
        """Enter when it is this request's turn; ``size`` is that of its body in bytes.

        Raises:
            KeyOverLimit: its key has too many requests, or too many a second.
            RouterFull: the router has, and it did not get better while the request waited.
        """
        return _Place(self, key, priority, size)

    def arriving(self) -> "Arriving":
        """Return what holds the bytes of a body while it comes; to be entered."""
        return Arriving(self.admission)

    def held(self, ticket: Ticket) -> Turn:
        """Return the turn of a request that has a ticket."""
        return _Held(self, ticket)

    async def enter(self, key: str, priority: int, size: int) -> Ticket:
        """Wait for the turn of a request; raises what ``admitted`` raises. Who gets a ticket has to ``leave``."""
        ticket = self.admission.arrive(key, priority, size, now=self._clock())
        self.wake()
        try:
            if ticket.state is State.WAITING:
                await self._wait(ticket)
        except BaseException:
            self.leave(ticket)
            raise
        if ticket.refusal is not None:
            raise _refused(ticket.refusal, key, self.admission.limits)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give back a place, or the wait for one."""
        if ticket.refusal is None:
            self.admission.leave(ticket)
            if self.admission.has_news:
                self.wake()

    def change(self, limits: Limits) -> None:
        """Go by other limits from now on."""
        self.admission.change(limits)
        self.wake()

    async def _wait(self, ticket: Ticket) -> None:
        event = self._woken[ticket] = asyncio.Event()
        try:
            while ticket.state is State.WAITING:  # a timer may be early
                try:
                    async with asyncio.timeout(max(0.0, ticket.due - self._clock())):
                        await event.wait()
                except TimeoutError:
                    self.admission.expire(now=self._clock())
                    self.wake()
        finally:
            del self._woken[ticket]

    def wake(self) -> None:
        """Tell those that wait what has become of them."""
        for ticket in self.admission.poll():
            if ticket in self._watching:
                # not from here: each of them may end at once, and wake the next one
                asyncio.get_running_loop().call_soon(self._watching[ticket])
            else:
                self._woken[ticket].set()

    # For requests that are told

    def arrive(self, key: str, priority: int, size: int) -> Ticket:
        """Return the ticket of a request: admitted, waiting or refused. It has to ``leave`` in any case."""
        ticket = self.admission.arrive(key, priority, size, now=self._clock())
        if self.admission.has_news:
            self.wake()
        return ticket

    def watch(self, ticket: Ticket, act: Callable[[], None]) -> None:
        """Call ``act`` when a ticket waits no more."""
        self._watching[ticket] = act

    def unwatch(self, ticket: Ticket) -> None:
        """Do not."""
        del self._watching[ticket]

    def check(self, ticket: Ticket) -> None:
        """Accept a ticket that was admitted; raises TurnedAway."""
        if ticket.refusal is not None:
            raise _refused(ticket.refusal, ticket.key, self.admission.limits)

    def expire(self) -> None:
        """Send away those that have waited too long."""
        if self.admission.waiting:
            self.admission.expire(now=self._clock())
            self.wake()

    def hold(self, size: int) -> None:
        """Charge bytes of a body that is not complete.

        Raises:
            RouterFull: the router holds as many as it may.
        """
        if not self.admission.hold(size):
            raise _refused(self.admission.no_bytes(), "", self.admission.limits)

    def free(self, size: int) -> None:
        """Give back bytes that were held."""
        self.admission.charge(-size)


class _Place(AbstractAsyncContextManager[None]):
    """One request's turn."""

    __slots__ = ("_asked", "_gate", "_ticket")

    _ticket: Ticket  # since it was entered

    def __init__(self, gate: Gate, key: str, priority: int, size: int) -> None:
        self._gate = gate
        self._asked = key, priority, size

    async def __aenter__(self) -> None:
        self._ticket = await self._gate.enter(*self._asked)

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave(self._ticket)


class _Held(AbstractAsyncContextManager[None]):
    """The turn of a request that was admitted before."""

    __slots__ = ("_gate", "_ticket")

    def __init__(self, gate: Gate, ticket: Ticket) -> None:
        self._gate = gate
        self._ticket = ticket

    async def __aenter__(self) -> None:
        """It is its turn."""

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave(self._ticket)


class Arriving(AbstractContextManager["Arriving"]):
    """The bytes of a body that is being read; they are given back at the end, when it is complete or given up."""

    __slots__ = ("_admission", "_size")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size = 0

    def grow(self, size: int) -> None:
        """Hold so many bytes more.

        Raises:
            RouterFull: the router holds as many as it may.
        """
        if not self._admission.hold(size):
            raise _refused(self._admission.no_bytes(), "", self._admission.limits)
        self._size += size

    def __exit__(self, *_: object) -> None:
        self._admission.charge(-self._size)
        self._size = 0


def _refused(refusal: Refusal, key: str, limits: Limits) -> KeyOverLimit | RouterFull:
    sentences = {
        Limit.KEY_RATE: f"the key {key} sends more than {limits.key_rate} requests a second",
        Limit.KEY_CONCURRENCY: f"the key {key} has {limits.key_concurrency} requests at work already",
        Limit.RATE: f"the router takes {limits.rate} requests a second, and this one is over it",
        Limit.BYTES: "the router holds as many bytes of requests as it may",
        Limit.QUEUE: "the router has as many requests waiting as it may",
        Limit.CONCURRENCY: f"the router had no place for this request within {limits.wait_s:g} s",
    }
    kind = KeyOverLimit if refusal.limit.is_the_keys else RouterFull
    return kind(f"{sentences[refusal.limit]} ({refusal.limit})", retry_after_s=refusal.retry_after_s)
