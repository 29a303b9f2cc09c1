"""Blocks of failed loads, kept from other requests until nothing can write into them any more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from pdrelay_connector.core.ids import RequestId


@dataclass(slots=True)
class _Quarantined:
    """The blocks of one load."""

    blocks: list[KVCacheBlock]
    # by the workers, which report its end with a step; of a push the control thread does
    is_read: bool
    ranks: int = 0  # that have yet to report that NIXL does not write into them


class Quarantine:
    """Runs on the engine thread, which owns vLLM's block pool."""

    def __init__(self, pool: Callable[[], BlockPool]) -> None:
        self._pool = pool
        self._loads: dict[RequestId, _Quarantined] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, own: RequestId, blocks: Sequence[int], *, is_read: bool) -> None:
        """Pin a load's blocks for one more rank, before vLLM frees them."""
        if own not in self._loads:
            pool = self._pool()
            pinned = [pool.blocks[block] for block in blocks]
            pool.touch(pinned)
            self._loads[own] = _Quarantined(pinned, is_read)
        self._loads[own].ranks += 1

    def end(self, own: RequestId) -> None:
        """Unpin a load's blocks for one rank; the last one frees them."""
        quarantined = self._loads[own]
        quarantined.ranks -= 1
        if not quarantined.ranks:
            self._pool().free_blocks(reversed(self._loads.pop(own).blocks))

    @property
    def awaits_step(self) -> bool:
        """Whether only a step can end a quarantine: workers report it with a step, for reads."""
        return any(quarantined.is_read for quarantined in self._loads.values())

    @property
    def blocks(self) -> int:
        """How many blocks are pinned."""
        return sum(len(quarantined.blocks) for quarantined in self._loads.values())
