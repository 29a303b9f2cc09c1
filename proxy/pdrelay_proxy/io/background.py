"""Work that goes on beside a block, and is over when the block is."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

# anew for each start of the server
Running: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]


@asynccontextmanager
async def meanwhile(work: Awaitable[object]) -> AsyncGenerator[asyncio.Future[object]]:
    """Do something meanwhile; it is dropped when the block is left."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def repeatedly(
    every_s: float, act: Callable[[], Awaitable[None]], log: logging.Logger, trouble: str
) -> None:
    """Do something again and again, so many seconds apart; a bug in it is logged, and must not end
    that for good.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            await act()
        except Exception:
            log.exception(trouble)
