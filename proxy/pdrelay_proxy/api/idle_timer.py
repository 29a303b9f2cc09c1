"""Ends what has been idle for too long, without a timer for each request."""

import asyncio
from collections.abc import Callable

from pdrelay_proxy.io.fair_timeout import LateTimer


class IdleTimer:
    """Calls back when so many seconds have passed since it was last restarted.

    A timer that comes late calls back only after the same time again: what would have ended the
    rest may have come, and is not read yet.
    """

    __slots__ = ("_lateness", "_loop", "_seconds", "_since", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._since = 0.0  # on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._lateness = LateTimer()

    def restart(self, act: Callable[[], None]) -> None:
        """Begin the time anew; ``act`` is kept until it was called or the timer is cancelled."""
        self._since = self._loop.time()
        if self._timer is None:
            self._arm(self._since + self._seconds, act)

    def cancel(self) -> None:
        """Do not call back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, due: float, act: Callable[[], None]) -> None:
        self._lateness.expect(due)
        self._timer = self._loop.call_at(due, self._check, act)

    def _check(self, act: Callable[[], None]) -> None:
        self._timer = None
        now = self._loop.time()
        due = self._since + self._seconds
        if due > now:  # it was restarted
            self._arm(due, act)
        elif self._lateness.is_late(now):
            self._arm(now + self._seconds, act)
        else:
            act()
