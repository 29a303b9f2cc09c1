"""The one place where the relay starts a task."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
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
