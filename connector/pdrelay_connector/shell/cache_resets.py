"""Resets of vLLM's prefix cache: earlier blocks must not be used any more, also by other engines.

An operator resets it when weights have changed in place (``/reset_prefix_cache``, ``/pause``), and
vLLM itself before it sleeps. Its block pool refuses that while blocks are in use, also by leases
(``reset_prefix_cache`` in ``v1/core/block_pool.py``), and a connector has no hook before.
"""

from collections.abc import Callable

from vllm.v1.core.block_pool import BlockPool


def before_resets(pool: BlockPool, prepare: Callable[[], None]) -> None:
    """Call ``prepare`` on the engine thread before each reset of a block pool."""
    reset: Callable[[], bool] = pool.reset_prefix_cache

    def prepared() -> bool:
        prepare()
        return reset()

    pool.reset_prefix_cache = prepared  # its manager asks it, and nothing else
