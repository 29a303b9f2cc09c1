"""How long an engine may take, without the time in which the router's process stood still."""

import asyncio
from types import TracebackType
from typing import Final

# a timer that is so late means that the process was stopped, starved or busy
_LATE_S: Final = 0.25


class LateTimer:
    """Tells whether a timer came late: then bytes that came in time may not be read yet.

    It says so once in a row, so a router that is always late still gives up on what takes too long.
    Times are seconds of any one clock.
    """

    __slots__ = ("_due", "_was_late")

    def __init__(self) -> None:
        self._due = 0.0
        self._was_late = False

    def expect(self, due: float) -> None:
        """Note when the timer is due."""
        self._due = due

    def is_late(self, now: float) -> bool:
        """Return whether the timer is late, and was not the time before."""
        self._was_late = not self._was_late and now - self._due > _LATE_S
        return self._was_late


class FairTimeout:
    """Ends the block with TimeoutError after so many seconds, as :func:`asyncio.timeout` does.

    Timers may run before received bytes are read (libuv runs them first). So if the timer itself is
    late, the engine may have answered in time: it gets the whole time again, once
    (:class:`LateTimer`).
    """

    __slots__ = ("_lateness", "_scope", "_seconds", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._scope = asyncio.timeout(None)
        self._lateness = LateTimer()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._arm(asyncio.get_running_loop())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, where)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._seconds
        self._lateness.expect(due)
        self._timer = loop.call_at(due, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        if self._lateness.is_late(now):
            self._arm(loop)
        else:
            self._timer = None
            self._scope.reschedule(now)
