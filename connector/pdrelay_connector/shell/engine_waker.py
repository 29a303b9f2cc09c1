"""Wakes vLLM's engine loop from another thread.

Only the engine thread can free blocks, and it may sleep when their lease ends. vLLM has no hook for
a connector to wake it, but its signal handlers put a WAKEUP into the engine's input queue
(``vllm/v1/engine/core.py``, 0.32). We find that queue on the stack that builds the connector, and
do the same.

A decode engine that only waits for a push computes no tokens, but vLLM steps it a thousand times a
second. Such a step waits on the same :class:`queue.Queue`, which receives new requests and our
WAKEUPs.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from pdrelay_connector.shell.building_engine import building_engine

logger = init_logger("vllm.pdrelay")


class EngineWaker:
    """The engine's input queue; None where vLLM has no engine loop."""

    def __init__(self, input_queue: Any | None) -> None:
        self._queue = input_queue

    def wake(self) -> None:
        """Wake a sleeping or waiting engine. Any thread may call it."""
        if self._queue is not None:
            self._queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def wait(self, seconds: float) -> None:
        """On the engine thread: wait for a wake-up or a request; return at once without a queue."""
        if self._queue is None:
            return
        with self._queue.not_empty:
            if not self._queue.queue:
                self._queue.not_empty.wait(seconds)

    @property
    def is_open(self) -> bool:
        """Whether vLLM has an engine loop here."""
        return self._queue is not None


def find_engine_waker() -> EngineWaker:
    """Return the waker of the engine that builds the caller's connector.

    Offline inference in one process has no engine loop. Then waking does nothing, and blocks are
    freed by the engine's next call, which precedes every allocation.
    """
    engine = building_engine()
    if isinstance(engine, EngineCoreProc):
        return EngineWaker(engine.input_queue)
    logger.info("pdrelay: no engine input queue here; blocks are freed at the engine's next call")
    return EngineWaker(None)
