"""The engine of vLLM that builds a connector: vLLM does not name it to its scheduler's
connector.
"""

import inspect

from vllm.v1.engine.core import EngineCore


def building_engine() -> EngineCore | None:
    """Find it on the caller's stack; None: something else builds the connector, as tests do."""
    frame = inspect.currentframe()
    while frame is not None:
        engine = frame.f_locals.get("self")
        if isinstance(engine, EngineCore):
            return engine
        frame = frame.f_back
    return None
