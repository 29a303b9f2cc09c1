"""Wake vLLM's engine loop from another thread.

Blocks whose lease ends while the engine sleeps can only be freed on the engine thread. vLLM has no hook
for a connector to wake it, but its own signal handlers put a WAKEUP into the engine's input queue
(``vllm/v1/engine/core.py``, 0.32); we find that queue on the stack that builds us and do the same.

A decode engine that only waits for a push has nothing to compute, but vLLM steps it a thousand times a second. The same
queue (a :class:`queue.Queue`) tells when something new is there: a request, or our own WAKEUP.
"""

import inspect
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.xpyd")


class EngineWaker:
    """The engine's input queue, as far as we use it."""

    def __init__(self, input_queue: Any | None) -> None:
        self._queue = input_queue

    def wake(self) -> None:
        """Have a sleeping, or waiting, engine make a turn; any thread may call it."""
        if self._queue is not None:
            self._queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def wait(self, seconds: float) -> None:
        """On the engine thread: wait for a wake-up or a request; returns at once where there is no queue."""
        if self._queue is None:
            return
        with self._queue.not_empty:
            if not self._queue.queue:
                self._queue.not_empty.wait(seconds)

    @property
    def is_open(self) -> bool:
        """Whether there is an engine loop behind it."""
        return self._queue is not None


def find_engine_waker() -> EngineWaker:
    """Return the door of the engine that is building the caller's connector.

    Where there is no such engine loop (offline inference in one process), knocking does nothing: then blocks are freed
    at the engine's next call, which precedes every allocation.
    """
    frame = inspect.currentframe()
    while frame is not None:
        engine = frame.f_locals.get("self")
        if isinstance(engine, EngineCoreProc):
            return EngineWaker(engine.input_queue)
        frame = frame.f_back
    logger.info("xpyd: no engine input queue here; blocks are freed at the engine's next call")
    return EngineWaker(None)
