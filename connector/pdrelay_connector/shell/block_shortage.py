"""Detects a request that waits for blocks which leases hold.

vLLM (``v1/core/sched/scheduler.py``, 0.32) calls ``get_num_new_matched_tokens`` for a waiting
request, allocates its blocks, and calls ``update_state_after_alloc``. If it lacks blocks, it stops
after the first call, and the step ends. Of a request that has its KV it asks nothing:
``failed_loads.py`` finds one that got no blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.core.layout.cache_groups import CacheGroup

# s between two attempts: revoked blocks are free a step later, and reads end meanwhile
RETRY_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class ShortRequest:
    """A request that lacks blocks, and their number."""

    request: Request
    blocks: int


class BlockShortage:
    """Runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._considered: tuple[Request, int] | None = None  # in this step, with its cached tokens

    def considered(self, request: Request, computed: int) -> None:
        """VLLM considers a waiting request, of which ``computed`` tokens are cached or loaded."""
        self._considered = request, computed

    def allocated(self, request: Request) -> None:
        """VLLM has allocated the request's blocks."""
        if self._considered is not None and self._considered[0] is request:
            self._considered = None

    def step(self, pool: BlockPool) -> ShortRequest | None:
        """Return the request that lacks blocks in this step. Called once per step."""
        considered = self._considered
        self._considered = None
        if considered is None:
            return None
        has_loaded = considered[0].num_computed_tokens > 0
        cached = 0 if has_loaded else cached_free_blocks(pool, self._groups, *considered)
        blocks = blocks_needed(self._groups, *considered) + cached - pool.get_num_free_blocks()
        return ShortRequest(considered[0], blocks) if blocks > 0 else None


class ShortageTimer:
    """When to revoke leases: after a shortage of so many ``seconds``, and then once a second."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: float | None = None  # absent while no request lacks blocks

    def is_due(self, *, is_short: bool, now: float) -> bool:
        """Tell whether to revoke leases now. Called once per step."""
        if not is_short:
            self._due = None
            return False
        if self._due is None:
            self._due = now + self._seconds
        if now < self._due:
            return False
        self._due = now + RETRY_INTERVAL
        return True


def blocks_needed(groups: Sequence[CacheGroup], request: Request, computed: int) -> int:
    """Return how many blocks the uncached tokens of a request need, over all KV cache groups."""
    return sum(group.new_blocks(request.num_tokens, computed) for group in groups)


def cached_free_blocks(
    pool: BlockPool, groups: Sequence[CacheGroup], request: Request, computed: int
) -> int:
    """Return how many free blocks are cached for a request, over all KV cache groups.

    The request would use them, so they are no room for its other tokens: vLLM counts them as blocks
    to allocate (``get_num_blocks_to_allocate`` in ``v1/core/single_type_kv_cache_manager.py``).
    """
    cached = 0
    for number, group in enumerate(groups if computed else ()):
        if group.block_size != pool.hash_block_size:
            continue  # vLLM joins hashes for it; without them its blocks count as room
        for block_hash in request.block_hashes[
            group.blocks_of(group.first_needed(computed), computed)
        ]:
            blocks = pool.get_cached_block(block_hash, [number])
            cached += blocks is not None and blocks[0].ref_cnt == 0
    return cached


def takes_the_last_blocks(
    pool: BlockPool, groups: Sequence[CacheGroup], request: Request, computed: int, tokens: int
) -> bool:
    """Tell whether a load of ``tokens`` would fit, but leave less than a block for each group.

    Then no request might be able to compute its next token: loaded requests keep their blocks, as
    vLLM preempts only running ones, and it schedules none behind the first that lacks a block.
    False if the engine has no other blocks in use.
    """
    free: int = pool.get_num_free_blocks()
    if free == pool.num_gpu_blocks - 1:
        return False
    free_after = free - sum(group.loaded_blocks(tokens, computed) for group in groups)
    if (
        not 0
        <= free_after
        < len(groups) * (1 + -(-computed // min(group.block_size for group in groups)))
    ):
        return False  # without a look at each cached block
    return 0 <= free_after - cached_free_blocks(pool, groups, request, computed) < len(groups)


def has_blocks(request: Request) -> bool:
    """As vLLM's ``_holds_kv_blocks`` (``v1/core/sched/scheduler.py``), for a running one, too."""
    return bool(request.num_computed_tokens) or request.status in (
        RequestStatus.RUNNING,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
    )
