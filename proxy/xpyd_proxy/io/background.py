"""Work that goes on beside a block, and is over when the block is."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager


@asynccontextmanager
async def meanwhile(work: Awaitable[object]) -> AsyncGenerator[asyncio.Future[object]]:
    """Do something meanwhile; it is dropped when the block is left."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
