"""Blocks of windows that a load has filled in part, and that must not be in the prefix cache.

A load brings a window from its first block on. Where the decode engine's blocks are larger than the
prefill engine's, that may begin within one of them, whose earlier tokens the prefill engine need
not have any more. VLLM takes all tokens of a loaded request for computed and enters the block into
its prefix cache (``_update_waiting_for_remote_kv`` in ``v1/core/sched/scheduler.py``, 0.32).
Another prompt that has only the beginning of this one would read what was in the block before.
"""

from collections.abc import Callable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.core.layout.cache_groups import CacheGroup


class PartialBlocks:
    """Everything runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup], pool: Callable[[], BlockPool]) -> None:
        self._groups = groups
        self._pool = pool
        self._loading: dict[str, tuple[Request, set[int]]] = {}  # by vLLM's request id

    def __len__(self) -> int:
        return len(self._loading)

    def loading(
        self,
        request: Request,
        tables: Sequence[Sequence[int]],
        tokens: int,
        external: int,
        sizes: Sequence[int],
    ) -> None:
        """Remember which blocks a load of the last ``external`` of so many tokens fills in part.

        ``sizes`` are the tokens of the prefill engine's blocks; without them any block may be.
        """
        partial: set[int] = set()
        for number, group in enumerate(self._groups):
            start, stop = group.missing_tokens(tokens + 1, external)
            unit = min(sizes[number], group.block_size) if sizes else 1
            if group.frees_early and start < stop and start // unit * unit % group.block_size:
                partial.add(tables[number][start // group.block_size])
        if partial:
            self._loading[request.request_id] = request, partial

    def evict(self, name: str) -> None:
        """Take incomplete blocks of a load out of the prefix cache: vLLM has entered them there.

        Called when the load has ended and its request is scheduled, or is over.
        """
        loading = self._loading.pop(name, None)
        if loading is not None:
            _, partial = loading
            self._pool().evict_blocks(partial)

    def step(self) -> None:
        """Evict those of loads that have ended, once a step is scheduled.

        VLLM may have found no block for the next token of such a request, and then ``evict`` was
        not called. It stops at that request: no other one was looked up in the prefix cache since.
        """
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        ended = [name for name, (request, _) in self._loading.items() if request.status != waiting]
        for name in ended:
            self.evict(name)
