"""Requests that wait for another connector, inside vLLM's MultiConnector.

A step without tokens waits for our results. Another connector looks KV up and loads it step by step
(``offloading/scheduler.py``, vLLM 0.32), and each step would wait, too: a prompt in files would
begin after 1.0 s in place of 0.1. So our step does not wait while a request waits for another
connector. VLLM does not name such requests; they are found by elimination:

- vLLM got our number of tokens to load for it, and allocated nothing although blocks are free;
- it waits for a load, but not for one of ours.
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
        """Note that vLLM got our number of tokens to load beyond the ``computed`` ones."""
        self._answered[request.request_id] = request, computed

    def allocated(self, request: Request) -> None:
        """VLLM has allocated the request's blocks."""
        self._answered.pop(request.request_id, None)

    def have_work(self, live: Iterable[Request], ours: Container[str]) -> bool:
        """Tell whether a request waits for another connector; ``ours``: requests of our loads."""
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
