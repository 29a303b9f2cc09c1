"""The one place where the relay starts tasks."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def running(work: Coroutine[None, None, T]) -> AsyncGenerator[asyncio.Task[T]]:
    """Do something meanwhile; when the block is left it is over, one way or the other."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # whoever cared has looked; asyncio would complain that nobody did


class Background:
    """Work that no request waits for; bounded, and over when the router is."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Callable[[], Coroutine[None, None, None]]) -> bool:
        """Start it, unless so many others are still at work: then return False."""
        if len(self._tasks) >= self._most:
            return False
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def drain(self, seconds: float) -> None:
        """Let what is at work come to its end, for so many seconds at most."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
