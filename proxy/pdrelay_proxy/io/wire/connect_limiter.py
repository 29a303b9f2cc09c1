"""Limits how many connections are being opened at once, first come first served.

The event loop goes breadth first: of hundreds of connections opened side by side, each gets one
step before any is ready, and all their requests go out at the end. With a few at a time, the first
request is on its way before the last connection is begun.
"""

import asyncio
from typing import Final

OPENING_MOST: Final = 8  # docs/performance.md: one of the best of 1 to 16
# of the event loop; a connection to this machine opens in four (asyncio) or two (uvloop)
_ITERATIONS: Final = 6


class ConnectSlot:
    """The right to open a connection; it ends by ``pass_on``, or after some iterations of the event
    loop.

    A connection that waits for the network costs the event loop nothing, so others may begin
    meanwhile.
    """

    __slots__ = ("_free", "_iterations_left", "_loop")

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free: asyncio.Semaphore | None = free
        self._iterations_left = _ITERATIONS
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._count_iteration)

    def pass_on(self) -> None:
        """Give the slot to the next connection, unless that has happened."""
        free = self._free
        self._free = None
        if free is not None:
            free.release()

    def _count_iteration(self) -> None:
        self._iterations_left -= 1
        if self._iterations_left <= 0:
            self.pass_on()
        elif self._free is not None:
            self._loop.call_soon(self._count_iteration)


class ConnectLimiter:
    """Gives out ``OPENING_MOST`` slots at a time."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(OPENING_MOST)

    async def acquire(self) -> ConnectSlot:
        """Wait for a slot; its holder must call ``pass_on``."""
        await self._free.acquire()
        return ConnectSlot(self._free)
