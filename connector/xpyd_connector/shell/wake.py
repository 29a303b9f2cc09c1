"""Wake vLLM's engine loop from another thread.

Blocks whose lease ends while the engine sleeps can only be freed on the engine thread. vLLM has no hook
for a connector to wake it, but its own signal handlers put a WAKEUP into the engine's input queue
(``vllm/v1/engine/core.py``, 0.32); we find that queue on the stack that builds us and do the same.
"""

import inspect
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

logger = init_logger("vllm.xpyd")


def find_waker() -> Callable[[], None]:
    """Return a function that wakes the engine that is building the caller's connector; any thread may call it.

    Where there is no such queue (offline inference in one process), it does nothing: then blocks are freed at
    the engine's next call, which precedes every allocation.
    """
    frame = inspect.currentframe()
    while frame is not None:
        engine = frame.f_locals.get("self")
        if isinstance(engine, EngineCoreProc):
            return _putter(engine.input_queue)
        frame = frame.f_back
    logger.info("xpyd: no engine input queue here; blocks are freed at the engine's next call")
    return lambda: None


def _putter(input_queue: Any) -> Callable[[], None]:
    return lambda: input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
