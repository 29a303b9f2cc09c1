"""Pins the sliding-window blocks of a prefill until they are leased.

A decode engine computes the last prompt token itself, so it needs the window before *that* token.
vLLM has computed it here already, and frees the blocks outside the window of the *next* token
before it calls ``request_finished`` (``v1/core/single_type_kv_cache_manager.py``, 0.32). For one
prompt length in ``block_size`` these differ by a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from pdrelay_connector.core.layout.cache_groups import CacheGroup

NULL = 0  # id of vLLM's null block, which stands for freed blocks


@dataclass(frozen=True, slots=True)
class _Pinned:
    """The pinned blocks of one request, for each KV cache group.

    A preemption starts a new ``attempt``.
    """

    attempt: int
    blocks: list[list[KVCacheBlock]]


class SlidingWindowPins:
    """Everything runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup], pool: Callable[[], BlockPool]) -> None:
        self._groups = groups
        self._pool = pool
        self._pinned: dict[str, _Pinned] = {}  # by vLLM's request id

    def __len__(self) -> int:
        return len(self._pinned)

    def step(self, output: SchedulerOutput, live: Mapping[str, Request]) -> None:
        """Pin the windows of the prompts whose last token this step computes."""
        self.release_preempted(live)
        state = output.kv_connector_block_state
        if state is None or not any(group.frees_early for group in self._groups):
            return
        for own, scheduled in output.num_scheduled_tokens.items():
            request = live.get(own)
            if request is None or not (request.kv_transfer_params or {}).get("do_remote_decode"):
                continue
            if request.num_computed_tokens + scheduled >= request.num_prompt_tokens:
                self._pin(own, request.num_preemptions, state.resolve_block_ids(own))

    def release_preempted(self, live: Mapping[str, Request]) -> None:
        """Unpin the blocks of preempted requests: perhaps these were the missing blocks."""
        for own, pinned in list(self._pinned.items()):
            if own not in live or live[own].num_preemptions != pinned.attempt:
                self.release(own)

    def _pin(self, own: str, attempt: int, table: Sequence[Sequence[int]]) -> None:
        pinned = self._pinned.get(own)
        if pinned is not None and pinned.attempt == attempt:
            return  # this step computes output tokens, whose window is another one
        pool = self._pool()
        blocks = [
            [pool.blocks[block] for block in ids] if group.frees_early else []
            for group, ids in zip(self._groups, table, strict=True)
        ]
        for group_blocks in blocks:
            pool.touch([block for block in group_blocks if not block.is_null])
        self._pinned[own] = _Pinned(attempt, blocks)

    def restore(self, own: str, table: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return a finished request's block table with its pinned blocks; then call `release`."""
        pinned = self._pinned.get(own)
        if pinned is None:
            return [list(ids) for ids in table]
        return [
            _filled(ids, pinned_blocks)
            for ids, pinned_blocks in zip(table, pinned.blocks, strict=True)
        ]

    def release(self, own: str) -> None:
        """Unpin the blocks of a request."""
        pinned = self._pinned.pop(own, None)
        for blocks in pinned.blocks if pinned is not None else ():
            self._pool().free_blocks([block for block in reversed(blocks) if not block.is_null])


def _filled(ids: Sequence[int], pinned_blocks: Sequence[KVCacheBlock]) -> list[int]:
    """Replace null blocks by the blocks that were pinned in their place."""
    before = [block.block_id for block in pinned_blocks]
    return [
        was if now == NULL else now
        for now, was in zip(ids, [*before, *ids[len(before) :]], strict=False)
    ]
