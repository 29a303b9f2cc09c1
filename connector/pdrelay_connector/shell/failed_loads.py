"""Requests with a failed load, which must let requests with a finished load pass.

vLLM keeps waiting requests that have blocks in a queue of their own, which comes first
(``kv_holding_waiting`` in ``v1/core/sched/scheduler.py``, 0.32 and 0.33). A request with a failed
load loses its blocks, but keeps its place there. If there are too few blocks for it, vLLM schedules
no request behind it, not even those with a finished load, which hold the blocks. If no other
request runs, that is a deadlock. But vLLM skips a request while the number of tokens to load is not
known. So the connector answers that for such a request every second time. Only vLLM knows how many
blocks the request needs: that some are missing shows when it gets none.

A request that was skipped waits in the other queue, which vLLM sorts by priority. Until it has
blocks again vLLM keeps as many free of other loads (``_inflight_prefill_reserved_blocks``). So a
load before it may lack just these blocks, and it must let the request pass in the same way.
"""

from collections.abc import Container, Iterable, Mapping

from vllm.v1.request import Request, RequestStatus


class FailedLoads:
    """Everything runs on the engine thread."""

    def __init__(self) -> None:
        self._failed: set[str] = set()  # vLLM's ids of requests that have no blocks since
        self._tried: set[str] = set()  # whom vLLM was to give blocks the last time
        self._ended: dict[str, Request] = {}  # loads, until vLLM has taken their requests up

    def ended(
        self, requests: Iterable[str], failed: Container[str], live: Mapping[str, Request]
    ) -> None:
        """Note the loads whose end vLLM has received; ``failed``: those that failed."""
        for name in requests:
            if name in live:
                self._ended[name] = live[name]
                if name in failed:
                    self._failed.add(name)

    def gives_way(self, request: Request) -> bool:
        """Tell whether a request must let those behind it pass.

        It must if it got no blocks the last time, and they hold some, or vLLM keeps some for them.
        """
        if not self._failed:
            return False
        name = request.request_id
        self._ended = {
            name: loaded for name, loaded in self._ended.items() if _waits_with_blocks(loaded)
        }
        if name in self._tried and (name not in self._failed or self._ended):
            self._tried.discard(name)
            return True
        self._tried.add(name)
        return False

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
