"""Time that passes when a test says so, however busy the machine is."""

import asyncio


class Clock:
    """Seconds for whatever takes a clock; ``now`` may be set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    async def silence(self, seconds: float) -> None:
        """Say nothing for so many seconds, again and again: an engine that hangs."""
        while True:
            self.now += seconds
            await asyncio.sleep(0.02)
