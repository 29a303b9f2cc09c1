"""An event loop that owns the clock: when nothing is left to do, its time jumps to what is due next.

A timeout of a minute takes no time, however busy the machine is, and "nothing more happens" is a fact: :func:`settle`
returns when only timers are left, :func:`advance` lets some of them come. A test that waits for what nobody will do
fails at once, and says which tasks wait. What shows a timestamp takes the loop's own: ``loop.time``.

Work in threads takes no time of this clock, and is waited for. Socket pairs are welcome, for the kernel fills them at
once; a peer in another process is not: it would be given no time.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

T = TypeVar("T")
_GRACE_S: Final = 2.0  # of the machine's time, for threads that no executor has


class Stuck(Exception):
    """All tasks wait, no timer runs, and nothing comes: the test would never end."""


class _Selector(selectors.DefaultSelector):
    """Waits for no timer: the loop's time jumps there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.work_in_threads = 0
        self.settling: list[asyncio.Future[None]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; else wake those who wait for calm; else let time pass."""
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.work_in_threads:
            return super().select(None)
        if self.settling:
            waiting = self.settling
            self.settling = []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
            return []
        if timeout is None:
            ready = super().select(_GRACE_S)
            if not ready:
                raise Stuck(_waiting_tasks())
            return ready
        self.now += timeout
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        """Return the simulated seconds since the loop was made."""
        return self._simulated.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Wait for work in a thread in the machine's time, which does not count here."""
        self._simulated.work_in_threads += 1
        work = super().run_in_executor(executor, func, *args)
        work.add_done_callback(self._work_over)
        return work

    async def settle(self) -> None:
        """Return when nothing more happens until a timer is due."""
        calm: asyncio.Future[None] = self.create_future()
        self._simulated.settling.append(calm)
        await calm

    def stand_still(self, seconds: float) -> None:
        """Let time pass as if the process were stopped: what is due meanwhile is late."""
        self._simulated.now += seconds

    def _work_over(self, _: asyncio.Future[Any]) -> None:
        self._simulated.work_in_threads -= 1


def simulated() -> SimulatedLoop:
    """Return the loop that runs the test."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimulatedLoop):
        raise TypeError(f"the test runs on {type(loop).__name__}: its folder must choose SimulatedLoop in conftest.py")
    return loop


async def settle() -> None:
    """Run until only timers are left."""
    await simulated().settle()


async def advance(seconds: float) -> None:
    """Let time pass: what is due meanwhile happens in its order, and all that follows from it."""
    await asyncio.sleep(seconds)
    await settle()


def in_simulated_time(work: Coroutine[Any, Any, T]) -> tuple[float, T]:
    """Run a coroutine; return the seconds that it took, and its result."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        result = runner.run(work)
        return runner.get_loop().time(), result


def _waiting_tasks() -> str:
    tasks = sorted(f"{task.get_name()} ({task.get_coro()})" for task in asyncio.all_tasks())
    return "nothing will ever happen again; these tasks wait:\n" + "\n".join(tasks)
