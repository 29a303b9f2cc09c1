"""A hook before an engine discards its memory.

VLLM 0.33 calls each worker's connector (``unregister_kv_caches``), one after the other, but not the
scheduler's. Peers are connected to the scheduler, and only it can refuse before any worker has
released its memory. Its process has the executor (``v1/engine/core.py``), whose ``sleep`` and
``discard`` discard the memory of all workers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.shell.building_engine import building_engine

CACHE_TAG: Final = "kv_cache"  # what vLLM calls that memory


def find_executor() -> Any:
    """Return the executor of the engine that builds the connector; raises ``UnsupportedCache``."""
    engine = building_engine()
    if engine is None:
        raise UnsupportedCache(
            "enable_sleep_mode is on, and no engine of vLLM that could sleep builds this connector"
        )
    return engine.model_executor


def before_sleeps(executor: Any, prepare: Callable[[], None], undo: Callable[[], None]) -> None:
    """Call ``prepare`` on the engine thread before the KV cache is discarded; it may raise.

    Then the memory stays. ``undo`` follows if vLLM did not discard the memory after all.
    """
    sleep: Callable[..., None] = executor.sleep
    discard: Callable[..., None] = executor.discard

    @contextmanager
    def prepared() -> Iterator[None]:
        prepare()
        try:
            yield
        finally:
            if CACHE_TAG not in executor.sleeping_tags:
                undo()

    def prepared_sleep(level: int = 1) -> None:
        with prepared():
            sleep(level)

    def prepared_discard(tags: tuple[str, ...]) -> None:
        with prepared() if CACHE_TAG in tags else nullcontext():
            discard(tags)

    executor.sleep = prepared_sleep  # the engine core asks it, and nothing else
    executor.discard = prepared_discard
