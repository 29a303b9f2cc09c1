"""Whether a request waits for blocks that leases hold, as vLLM's scheduler lets a connector see it.

vLLM (``v1/core/sched/scheduler.py``, 0.32) asks the connector about a waiting request, allocates its blocks and tells
the connector; where it lacks blocks it stops there, and the step ends with the request asked about and not told.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from xpyd_connector.core.layout.cache_groups import CacheGroup

AGAIN = 1.0  # s between two attempts: what is revoked is free a step later, and a read may end meanwhile


@dataclass(frozen=True, slots=True)
class ShortRequest:
    """A request that has waited long enough, and how many blocks it lacks."""

    request: Request
    blocks: int


class BlockShortage:
    """Runs on the engine thread. ``threshold`` (s) is how long a request lacks blocks before something is done."""

    def __init__(self, groups: Sequence[CacheGroup], *, threshold: float) -> None:
        self._groups = groups
        self._threshold = threshold
        self._considered: tuple[Request, int] | None = None  # in this step, and how many of its tokens are cached here
        self._look_at: float | None = None  # absent while nothing is lacking

    def considered(self, request: Request, computed: int) -> None:
        """VLLM considers a waiting request."""
        self._considered = request, computed

    def allocated(self, request: Request) -> None:
        """It has its blocks."""
        if self._considered is not None and self._considered[0] is request:
            self._considered = None

    def step(self, pool: BlockPool, *, now: float) -> ShortRequest | None:
        """A step is scheduled: return who has lacked blocks for too long, at most once a second."""
        considered, self._considered = self._considered, None
        blocks = self._blocks(*considered) - pool.get_num_free_blocks() if considered is not None else 0
        if considered is None or blocks <= 0:
            self._look_at = None
            return None
        if self._look_at is None:
            self._look_at = now + self._threshold
        if now < self._look_at:
            return None
        self._look_at = now + AGAIN
        return ShortRequest(considered[0], blocks)

    def _blocks(self, request: Request, computed: int) -> int:
        """Return how many blocks the rest of a request takes, of all KV cache groups, as if it were read from afar."""
        return sum(-(-request.num_tokens // group.block_size) - computed // group.block_size for group in self._groups)
