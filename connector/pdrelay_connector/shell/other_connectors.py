"""Requests that wait for another connector, inside vLLM's MultiConnector.

A step without tokens waits for news of ours. Another connector looks KV up and loads it step by
step (``offloading/scheduler.py``, vLLM 0.32), and each step would take as long: a prompt in files
would begin after 1.0 s in place of 0.1. So no step of ours waits while a request waits for another
connector. VLLM does not tell us of such requests; they are those that are left:

- vLLM has asked us how many tokens are loaded, we knew, and it has allocated nothing although
  blocks are free;
- a request waits for a load, and it is none of ours.
"""

from collections.abc import Callable, Container, Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.shell.block_shortage import blocks_needed


class OtherConnectors:
    """Everything runs on the engine thread."""

    def __init__(self, groups: Sequence[CacheGroup], pool: Callable[[], BlockPool]) -> None:
        self._groups = groups
        self._pool = pool
        # in this step and not allocated, with the cached tokens
        self._answered: dict[str, tuple[Request, int]] = {}

    def answered(self, request: Request, computed: int) -> None:
        """VLLM was told how many tokens beyond the ``computed`` ones we load."""
        self._answered[request.request_id] = request, computed

    def allocated(self, request: Request) -> None:
        """VLLM has allocated the request's blocks."""
        self._answered.pop(request.request_id, None)

    def have_work(self, live: Iterable[Request], ours: Container[str]) -> bool:
        """Tell whether a request waits for another connector; ``ours``: those whose load is
        ours.
        """
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        if any(request.status == waiting and request.request_id not in ours for request in live):
            return True
        return any(self._has_room(*answered) for answered in self._answered.values())

    def step_over(self) -> None:
        """VLLM asks anew in the next step."""
        self._answered.clear()

    def _has_room(self, request: Request, computed: int) -> bool:
        free: int = self._pool().get_num_free_blocks()
        return blocks_needed(self._groups, request, computed) <= free
