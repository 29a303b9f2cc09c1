"""Requests whose load has failed, and that let loads pass which have ended.

vLLM keeps requests that wait with blocks in a queue of their own, which comes first
(``kv_holding_waiting`` in ``v1/core/sched/scheduler.py``, 0.32 and 0.33). A request whose load has
failed loses its blocks there and keeps its place. If there are too few blocks for it, vLLM looks at
no request behind it: not at those whose load has ended, which hold the blocks. If nothing else
runs, that is for ever. vLLM passes over a request of which it is not known yet how many tokens can
be loaded, so this is said of it for as long.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.shell.block_shortage import blocks_needed


class FailedLoads:
    """Everything runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup], pool: Callable[[], BlockPool]) -> None:
        self._groups = groups
        self._pool = pool
        self._failed: set[str] = set()  # vLLM's ids of requests that have no blocks since
        self._ended: dict[str, Request] = {}  # loads, until vLLM has taken their requests up

    def ended(
        self, requests: Iterable[str], failed: Container[str], live: Mapping[str, Request]
    ) -> None:
        """VLLM has received the end of these requests' loads; ``failed``: of those that did not
        succeed.
        """
        for name in requests:
            if name in live:
                self._ended[name] = live[name]
                if name in failed:
                    self._failed.add(name)

    def gives_way(self, request: Request, computed: int) -> bool:
        """Tell whether a request lacks blocks that are held by requests behind it whose loads have
        ended.
        """
        if request.request_id not in self._failed:
            return False
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._ended = {name: each for name, each in self._ended.items() if each.status == waiting}
        needed = blocks_needed(self._groups, request, computed)
        return bool(self._ended) and needed > self._pool().get_num_free_blocks()

    def over(self, name: str) -> None:
        """A request has blocks again, or has finished."""
        self._failed.discard(name)
        self._ended.pop(name, None)
