"""Waiting, but not for ever."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from xpyd_proxy.errors import ProxyError


class Limit(AbstractAsyncContextManager["Limit"]):
    """A block that ends with an error of ours when its time is over: asyncio.Timeout at a third of its cost."""

    __slots__ = ("_cancelling", "_ends_at", "_expired", "_late", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float | None, late: Callable[[float], ProxyError]) -> None:
        self._seconds = seconds
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at: float | None = None
        self._task: asyncio.Task[object] | None = None
        self._expired = False
        self._cancelling = 0  # how often its task had been cancelled before

    def when(self) -> float | None:
        """Return when the time is over, on the event loop's clock; None: never."""
        return self._ends_at  # not the timer's: uvloop makes none for a time that has passed

    def reschedule(self, when: float) -> None:
        """Have the time end then."""
        if self._timer is not None:
            self._timer.cancel()
        self._ends_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._expire)

    async def __aenter__(self) -> Self:
        if self._seconds is not None:
            loop = asyncio.get_running_loop()
            self._task = asyncio.current_task(loop)
            self._cancelling = 0 if self._task is None else self._task.cancelling()
            self._ends_at = loop.time() + self._seconds
            self._timer = loop.call_at(self._ends_at, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        task, self._task = self._task, None  # which may hold an error that leads to our block, and so to us: a circle
        if not self._expired or task is None or self._seconds is None:
            return
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._late(self._seconds) from error

    def _expire(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()


def at_most(seconds: float | None, late: Callable[[float], ProxyError]) -> Limit:
    """Give the block so many seconds (None: as many as it likes); raises ``late(seconds)`` when they are over."""
    return Limit(seconds, late)
