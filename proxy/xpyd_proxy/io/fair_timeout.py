"""How long an engine may take, without the time in which the router's own process stood still."""

import asyncio
from types import TracebackType
from typing import Final

LATE_S: Final = 0.25  # a timer that runs so late says that the process was stopped, starved or busy


class FairTimeout:
    """Ends what is inside with TimeoutError after so many seconds, as :func:`asyncio.timeout` does.

    Timers may run before what has arrived is read (libuv runs them first). So where the timer itself is late, nobody
    knows what the engine has done in time: it gets the whole time again, once.
    """

    __slots__ = ("_due", "_is_second", "_scope", "_seconds", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._scope = asyncio.timeout(None)
        self._is_second = False
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._arm(asyncio.get_running_loop())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, where)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + self._seconds
        self._timer = loop.call_at(self._due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        if not self._is_second and now - self._due > LATE_S:
            self._is_second = True
            self._arm(loop)
        else:
            self._timer = None
            self._scope.reschedule(now)
