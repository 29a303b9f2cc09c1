"""Work that runs beside a block, and is over when the block is."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from pdrelay_proxy.core.steps import finish

# a context of its own for each start of the server
Running: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]


@asynccontextmanager
async def meanwhile(work: Awaitable[object]) -> AsyncGenerator[asyncio.Future[object]]:
    """Run something while the block lasts; at its end it is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def repeatedly(
    every_s: float, act: Callable[[], Awaitable[None]], log: logging.Logger, trouble: str
) -> None:
    """Do something every ``every_s`` seconds; a bug in it is logged, and ends nothing."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await act()
        except Exception:
            log.exception(trouble)


async def finish_in_any_case(steps: Generator[None]) -> None:
    """Run steps, with other tasks in between; a task that is cancelled runs the others at once."""
    try:
        for _ in steps:
            await asyncio.sleep(0)
    finally:
        finish(steps)
