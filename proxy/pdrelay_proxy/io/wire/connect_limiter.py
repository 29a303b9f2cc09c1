"""Turns to open a connection, first come first served.

The event loop goes breadth first: of hundreds of connections that are opened side by side, each is
taken a step further before the first one is ready, and all their requests go out at the end. A few
at a time, the first request is on its way before the last connection is begun.
"""

import asyncio
from typing import Final

OPENING_MOST: Final = 8  # docs/performance.md: one of the best of 1 to 16
# of the event loop; a connection to this machine is open after four (asyncio), or two (uvloop)
_ROUNDS: Final = 6


class ConnectSlot:
    """The right to open a connection, until it is passed on: after some rounds of the event loop at
    the latest.

    Who waits for the network takes no time of the event loop, so others may begin meanwhile.
    """

    __slots__ = ("_free", "_left", "_loop")

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free: asyncio.Semaphore | None = free
        self._left = _ROUNDS
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._wait)

    def pass_on(self) -> None:
        """Let the next one begin, if that has not happened yet."""
        free = self._free
        self._free = None
        if free is not None:
            free.release()

    def _wait(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.pass_on()
        elif self._free is not None:
            self._loop.call_soon(self._wait)


class ConnectLimiter:
    """Gives a few turns at a time."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(OPENING_MOST)

    async def take(self) -> ConnectSlot:
        """Wait for a turn; whoever has it passes it on."""
        await self._free.acquire()
        return ConnectSlot(self._free)
