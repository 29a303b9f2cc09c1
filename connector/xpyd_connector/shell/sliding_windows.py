"""Blocks of sliding windows, kept until their prefill is handed over.

A decode engine computes the last prompt token itself and needs the window before *that* one. vLLM, which has computed
it here, frees by the window of the next token before it tells us that the request is finished: one token further, and
now and then (once in ``block_size`` lengths) the last block a decode engine needs is in between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from xpyd_connector.core.layout.cache_groups import CacheGroup

NULL = 0  # the id of vLLM's null block: "not held"


@dataclass(frozen=True, slots=True)
class _Pinned:
    """What is kept for one request: blocks of each KV cache group, as of its ``attempt``."""

    attempt: int
    blocks: list[list[KVCacheBlock]]


class SlidingWindowPins:
    """Everything runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup], pool: Callable[[], BlockPool]) -> None:
        self._groups = groups
        self._pool = pool
        self._pinned: dict[str, _Pinned] = {}  # by vLLM's id of the request

    def __len__(self) -> int:
        return len(self._pinned)

    def step(self, output: SchedulerOutput, live: Mapping[str, Request]) -> None:
        """Pin the windows of the prompts whose last tokens this step computes."""
        for own, pinned in list(self._pinned.items()):
            if own not in live or live[own].num_preemptions != pinned.attempt:
                self.release(own)  # preempted, maybe for lack of these very blocks
        state = output.kv_connector_block_state
        if state is None or not any(group.frees_early for group in self._groups):
            return
        for own, scheduled in output.num_scheduled_tokens.items():
            request = live.get(own)
            if request is None or not (request.kv_transfer_params or {}).get("do_remote_decode"):
                continue
            if request.num_computed_tokens + scheduled >= request.num_prompt_tokens:
                self._pin(own, request.num_preemptions, state.resolve_block_ids(own))

    def _pin(self, own: str, attempt: int, table: Sequence[Sequence[int]]) -> None:
        pinned = self._pinned.get(own)
        if pinned is not None and pinned.attempt == attempt:
            return  # this step computes the answer: its window has left the prompt's behind
        pool = self._pool()
        blocks = [
            [pool.blocks[block] for block in ids] if group.frees_early else []
            for group, ids in zip(self._groups, table, strict=True)
        ]
        for each in blocks:
            pool.touch([block for block in each if not block.is_null])
        self._pinned[own] = _Pinned(attempt, blocks)

    def restore(self, own: str, table: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return a finished request's blocks with those that are only held by us; :meth:`release` comes after."""
        pinned = self._pinned.get(own)
        if pinned is None:
            return [list(ids) for ids in table]
        return [_filled(ids, known) for ids, known in zip(table, pinned.blocks, strict=True)]

    def release(self, own: str) -> None:
        """Let go of a request's blocks."""
        pinned = self._pinned.pop(own, None)
        for blocks in pinned.blocks if pinned is not None else ():
            self._pool().free_blocks([block for block in reversed(blocks) if not block.is_null])


def _filled(ids: Sequence[int], known: Sequence[KVCacheBlock]) -> list[int]:
    """Put the blocks that were there before into the places of those that are not held any more."""
    before = [block.block_id for block in known]
    return [was if now == NULL else now for now, was in zip(ids, [*before, *ids[len(before) :]], strict=False)]
