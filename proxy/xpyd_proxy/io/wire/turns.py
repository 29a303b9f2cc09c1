"""Turns to open a connection, first come first served.

The event loop goes breadth first: of hundreds of connections that are opened side by side, each is taken a step
further before the first one is ready, and all their requests go out at the end. A few at a time, the first request is
on its way before the last connection is begun.
"""

import asyncio
from typing import Final

AT_ONCE: Final = 8  # of 1 to 64, those with the least time to the first token of 256 requests (docs/performance.md)
_PATIENCE_S: Final = 0.005  # seconds after which the next one begins anyway: a network, or a dead host, takes longer


class Turn:
    """The right to open a connection, until it is passed on."""

    __slots__ = ("_free", "_timer")

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(_PATIENCE_S, self.pass_on)

    def pass_on(self) -> None:
        """Let the next one begin, if that has not happened yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._free.release()


class Turns:
    """Gives a few turns at a time. One that is held up gives its own away, so a dead engine holds up no other."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_ONCE)

    async def take(self) -> Turn:
        """Wait for a turn; whoever has it passes it on."""
        await self._free.acquire()
        return Turn(self._free)
