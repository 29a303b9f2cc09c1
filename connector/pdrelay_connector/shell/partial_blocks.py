"""Blocks of windows that a load has filled in part, and that must not be in the prefix cache.

A load brings a window from its first token on. Where the decode engine's blocks are larger than the
prefill engine's, that may begin within one of them, whose earlier tokens the prefill engine need
not have any more. VLLM takes all tokens of a loaded request for computed and enters the block into
its prefix cache: when the load has ended (``_update_waiting_for_remote_kv`` in
``v1/core/sched/scheduler.py``, 0.32), or when the request itself fills the rest of it. Another
prompt that has only the beginning of this one would read what was in the block before.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from pdrelay_connector.core.layout.cache_groups import CacheGroup


class PartialBlocks:
    """Everything runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._partial: dict[str, set[int]] = {}  # by vLLM's request id

    def __len__(self) -> int:
        return len(self._partial)

    def keep_out_of(self, pool: BlockPool) -> None:
        """Have a block pool cache none of these blocks; its managers call it by keywords."""
        cache_full_blocks: Any = pool.cache_full_blocks

        def without_partial(
            *,
            request: Request,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            block_mask: list[bool] | None = None,
            **others: int,
        ) -> None:
            if partial := self._partial.get(request.request_id):
                new = blocks[num_cached_blocks:num_full_blocks]
                allowed = [True] * len(new) if block_mask is None else block_mask
                block_mask = [
                    may and block.block_id not in partial
                    for may, block in zip(allowed, new, strict=True)
                ]
            cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=num_cached_blocks,
                num_full_blocks=num_full_blocks,
                block_mask=block_mask,
                **others,
            )

        pool.cache_full_blocks = without_partial

    def loading(
        self,
        name: str,
        tables: Sequence[Sequence[int]],
        tokens: int,
        external: int,
        sizes: Sequence[int],
    ) -> int:
        """Remember which blocks a load of the last ``external`` of so many tokens fills in part.

        ``sizes`` are the tokens of the prefill engine's blocks; without them any block may be.
        Returns how many of the tokens are before these blocks.
        """
        partial: set[int] = set()
        before = tokens
        for number, group in enumerate(self._groups):
            start, stop = group.missing_tokens(tokens + 1, external)
            unit = min(sizes[number], group.block_size) if sizes else 1
            if group.frees_early and start < stop and start // unit * unit % group.block_size:
                partial.add(tables[number][start // group.block_size])
                before = min(before, start // group.block_size * group.block_size)
        if partial:
            self._partial[name] = partial
        return before

    def over(self, name: str) -> None:
        """A request has ended."""
        self._partial.pop(name, None)
