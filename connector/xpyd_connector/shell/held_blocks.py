"""The blocks that a prefill engine holds for others, and which leases to revoke when it lacks blocks itself.

Everything here runs on the engine thread, which owns vLLM's block pool.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from xpyd_connector.core.ids import RequestId
from xpyd_connector.core.lease.prefill_scheduler import RevocableLease

MOST = 1024  # leases that are named at a time
ENOUGH = 4  # times the blocks that are lacking are named: some of them are being read


@dataclass(frozen=True, slots=True)
class _HeldLease:
    """One lease's blocks, and the priority (vLLM's: a higher number is less important) of the request it was for."""

    blocks: list[KVCacheBlock]
    priority: int


class HeldBlocks:
    """Blocks by lease. Leases of prompts that begin alike share blocks: each block counts once."""

    def __init__(self) -> None:
        self._held: dict[RequestId, _HeldLease] = {}
        self._by_priority: dict[int, dict[RequestId, None]] = {}  # the oldest first
        self._leases_of: Counter[int] = Counter()  # block -> leases that hold it

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._held

    @property
    def blocks(self) -> int:
        """How many blocks are held."""
        return len(self._leases_of)

    def new_blocks(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Return how many of these blocks are not held yet."""
        return sum(block.block_id not in self._leases_of for block in blocks)

    def add(self, request: RequestId, blocks: list[KVCacheBlock], priority: int) -> None:
        """Hold these blocks."""
        self._held[request] = _HeldLease(blocks, priority)
        self._by_priority.setdefault(priority, {})[request] = None
        self._leases_of.update(block.block_id for block in blocks)

    def take(self, request: RequestId) -> list[KVCacheBlock]:
        """Hold the blocks of a lease no longer, and return them."""
        held = self._held.pop(request)
        same = self._by_priority[held.priority]
        del same[request]
        if not same:
            del self._by_priority[held.priority]
        for block in held.blocks:
            self._leases_of[block.block_id] -= 1
            if not self._leases_of[block.block_id]:
                del self._leases_of[block.block_id]
        return held.blocks

    def candidates(self, blocks: int, priority: int) -> list[RevocableLease]:
        """Return leases whose end gives ``blocks`` blocks to a request of a ``priority``, and some more.

        The least important first, the oldest of them first; none that is more important than the request. A block
        that something else uses, or a lease that is not named, is not free afterwards and does not count.
        """
        found: list[RevocableLease] = []
        gone: Counter[int] = Counter()
        gain = 0
        for request in self._in_order(priority):
            if gain >= ENOUGH * blocks or len(found) == MOST:
                break
            ours = self._held[request].blocks
            gone.update(block.block_id for block in ours)
            free = sum(block.ref_cnt == gone[block.block_id] for block in ours)
            found.append(RevocableLease(request, free))
            gain += free
        return found

    def _in_order(self, priority: int) -> Iterator[RequestId]:
        for each in sorted(self._by_priority, reverse=True):
            if each < priority:
                return
            yield from self._by_priority[each]
