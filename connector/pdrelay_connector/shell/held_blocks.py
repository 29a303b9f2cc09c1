"""The blocks that a prefill engine holds for decode engines, and the choice of leases to revoke.

Everything here runs on the engine thread, which owns vLLM's block pool.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.lease.prefill_scheduler import RevocableLease

MAX_CANDIDATES = 1024  # leases
# candidates cover so many times the lacking blocks: leases that are being read do not end
CANDIDATE_FACTOR = 4


@dataclass(frozen=True, slots=True)
class _HeldLease:
    """One lease's blocks, and its request's priority in vLLM (higher: less important)."""

    blocks: list[KVCacheBlock]
    priority: int


class HeldBlocks:
    """Blocks by lease.

    Leases of prompts with a common prefix share blocks; each block counts once.
    """

    def __init__(self) -> None:
        self._leases: dict[RequestId, _HeldLease] = {}
        self._by_priority: dict[int, dict[RequestId, None]] = {}  # oldest first
        self._leases_of: Counter[int] = Counter()  # number of leases by block

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._leases

    @property
    def blocks(self) -> int:
        """Number of held blocks."""
        return len(self._leases_of)

    def new_blocks(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Return how many of these blocks no lease holds yet."""
        return sum(block.block_id not in self._leases_of for block in blocks)

    def add(self, request: RequestId, blocks: list[KVCacheBlock], priority: int) -> None:
        """Hold the blocks of a lease."""
        self._leases[request] = _HeldLease(blocks, priority)
        self._by_priority.setdefault(priority, {})[request] = None
        self._leases_of.update(block.block_id for block in blocks)

    def remove(self, request: RequestId) -> list[KVCacheBlock]:
        """Remove a lease, and return its blocks."""
        lease = self._leases.pop(request)
        same = self._by_priority[lease.priority]
        del same[request]
        if not same:
            del self._by_priority[lease.priority]
        for block in lease.blocks:
            self._leases_of[block.block_id] -= 1
            if not self._leases_of[block.block_id]:
                del self._leases_of[block.block_id]
        return lease.blocks

    def candidates(self, blocks: int, priority: int) -> list[RevocableLease]:
        """Return leases to revoke for a request of a ``priority``, to free ``blocks`` blocks.

        The least important come first, then the oldest; none is more important than the request. A
        block counts as freed only if no running request and no other lease uses it.
        """
        leases: list[RevocableLease] = []
        released: Counter[int] = Counter()
        gain = 0
        for request in self._in_order(priority):
            if gain >= CANDIDATE_FACTOR * blocks or len(leases) == MAX_CANDIDATES:
                break
            ours = self._leases[request].blocks
            released.update(block.block_id for block in ours)
            free = sum(block.ref_cnt == released[block.block_id] for block in ours)
            leases.append(RevocableLease(request, free))
            gain += free
        return leases

    def _in_order(self, priority: int) -> Iterator[RequestId]:
        for level in sorted(self._by_priority, reverse=True):
            if level < priority:
                return
            yield from self._by_priority[level]
