"""The moment before an engine puts its memory away.

VLLM 0.33 tells each worker's connector (``unregister_kv_caches``), one after the other, and the
scheduler's not at all. It is the scheduler that peers are connected to, and that can still refuse,
before any worker has let go. Its process has the executor (``v1/engine/core.py``), whose ``sleep``
and ``discard`` put the memory of all workers away.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.shell.building_engine import building_engine

CACHE_TAG: Final = "kv_cache"  # what vLLM calls that memory


def find_executor() -> Any:
    """Return the executor of the engine that builds the caller's connector; raises
    ``UnsupportedCache`` without one.
    """
    engine = building_engine()
    if engine is None:
        raise UnsupportedCache(
            "enable_sleep_mode is on, and no engine of vLLM that could sleep builds this connector"
        )
    return engine.model_executor


def before_sleeps(executor: Any, prepare: Callable[[], None], undo: Callable[[], None]) -> None:
    """Call ``prepare`` on the engine thread before the KV cache's memory goes; if it raises, the
    memory stays.

    ``undo`` follows if vLLM has not put it away after all.
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
