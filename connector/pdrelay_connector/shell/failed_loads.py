"""Requests with a failed load, which must let requests with a finished load pass.

vLLM keeps waiting requests that have blocks in a queue of their own, which comes first
(``kv_holding_waiting`` in ``v1/core/sched/scheduler.py``, 0.32 and 0.33). A request with a failed
load loses its blocks, but keeps its place there. If there are too few blocks for it, vLLM schedules
no request behind it, not even those with a finished load, which hold the blocks. If no other
request runs, that is a deadlock. But vLLM skips a request while the number of tokens to load is not
known. So the connector answers that for such a request every second time. Only vLLM knows how many
blocks the request needs: that some are missing shows when it gets none.

vLLM 0.30 has no such queue: requests whose loads have ended wait among all others, and one without
blocks may be before them, by vLLM's priority or because it was skipped once. There every request
lets them pass.

From the start of a load to the last token of its prompt, vLLM keeps as many blocks free of other
loads as a request still needs (``_inflight_prefills``). It ends that when it preempts a request,
but not when a load fails. So a load may lack just these blocks: one that vLLM's priority puts
before the failed one, or, in MultiConnector, the same request's next load, by another connector,
even if the cache is empty. So we end it when a load fails.
"""

from collections.abc import Container, Iterable, Mapping
from functools import cached_property

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.shell.building_engine import builder_of


class FailedLoads:
    """Everything runs on the engine thread."""

    def __init__(self) -> None:
        self._failed: set[str] = set()  # vLLM's ids of requests that have no blocks since
        self._tried: set[str] = set()  # whom vLLM was to give blocks the last time
        self._ended: dict[str, Request] = {}  # loads, until vLLM has taken their requests up
        self._scheduler = builder_of(Scheduler)  # absent where tests build the connector

    def ended(
        self, requests: Iterable[str], failed: Container[str], live: Mapping[str, Request]
    ) -> None:
        """Note the loads whose end vLLM has received; ``failed``: those that failed."""
        for name in requests:
            if name in live:
                self._ended[name] = live[name]
                if name in failed:
                    self._failed.add(name)
                    if self._scheduler is not None:
                        self._scheduler._inflight_prefills.discard(live[name])  # noqa: SLF001

    def gives_way(self, request: Request) -> bool:
        """Tell whether a request must let requests with finished loads behind it pass.

        It must if it got no blocks the last time, and they hold some.
        """
        name = request.request_id
        if name not in self._failed and self._have_own_queue:
            return False
        self._ended = {
            name: loaded for name, loaded in self._ended.items() if _waits_with_blocks(loaded)
        }
        if name in self._tried and self._ended:
            self._tried.discard(name)
            return True
        self._tried.add(name)
        return False

    @cached_property
    def _have_own_queue(self) -> bool:
        """Whether those with blocks come first: from vLLM 0.31 on."""
        return self._scheduler is None or hasattr(self._scheduler, "kv_holding_waiting")

    def lacking_blocks(self) -> Request | None:
        """Return a request that has its KV, and that vLLM has not taken up for lack of blocks.

        VLLM asks no connector about it.
        """
        for request in self._ended.values():
            is_tried = request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
            if is_tried and request.num_computed_tokens:
                return request
        return None

    def over(self, name: str) -> None:
        """A request has blocks again, or has finished."""
        self._failed.discard(name)
        self._tried.discard(name)
        self._ended.pop(name, None)


def _waits_with_blocks(loaded: Request) -> bool:
    """Tell whether a request has the blocks of its load, and vLLM has not taken it up yet."""
    if loaded.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return True
    has_kv: bool = loaded.num_computed_tokens > 0
    return has_kv and loaded.status != RequestStatus.RUNNING
