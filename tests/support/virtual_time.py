"""An event loop whose clock jumps to what is due next: hours of waiting pass in a moment."""

import asyncio
import selectors


class _Jumps(selectors.DefaultSelector):
    """Waits for nothing: what it would have waited is added to the clock, unless something has come."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """For code that waits for time alone: a real peer would be given none."""

    def __init__(self):
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self):
        return self._jumps.now


def in_virtual_time(work):
    """Run a coroutine; return the seconds that it took, and its result."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        result = runner.run(work)
        return runner.get_loop().time(), result
