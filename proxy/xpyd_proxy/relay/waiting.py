"""Waiting, but not for ever."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from xpyd_proxy.errors import ProxyError


@asynccontextmanager
async def at_most(seconds: float | None, late: Callable[[float], ProxyError]) -> AsyncGenerator[asyncio.Timeout]:
    """Give the block so many seconds (None: as many as it likes); raises ``late(seconds)`` when they are over."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except TimeoutError as exc:
        if seconds is None or not limit.expired():
            raise
        raise late(seconds) from exc
