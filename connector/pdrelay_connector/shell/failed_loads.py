"""Requests whose load has failed, and that let loads pass which have ended.

vLLM keeps requests that wait with blocks in a queue of their own, which comes first
(``kv_holding_waiting`` in ``v1/core/sched/scheduler.py``, 0.32 and 0.33). A request whose load has
failed loses its blocks there and keeps its place. If there are too few blocks for it, vLLM looks at
no request behind it: not at those whose load has ended, which hold the blocks. If nothing else
runs, that is for ever. vLLM passes over a request of which it is not known yet how many tokens can
be loaded, so this is said of it each second time. How many blocks it needs is vLLM's to know: that
it lacks some shows when it gets none.
"""

from collections.abc import Container, Iterable, Mapping

from vllm.v1.request import Request, RequestStatus


class FailedLoads:
    """Everything runs on the engine thread."""

    def __init__(self) -> None:
        self._failed: set[str] = set()  # vLLM's ids of requests that have no blocks since
        self._tried: set[str] = set()  # those of them that vLLM was to give blocks the last time
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

    def gives_way(self, request: Request) -> bool:
        """Tell whether a request that vLLM considers lets those behind it pass whose loads have
        ended: it got no blocks the last time, and they hold some.
        """
        name = request.request_id
        if name not in self._failed:
            return False
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._ended = {name: each for name, each in self._ended.items() if each.status == waiting}
        if name in self._tried and self._ended:
            self._tried.discard(name)
            return True
        self._tried.add(name)
        return False

    def over(self, name: str) -> None:
        """A request has blocks again, or has finished."""
        self._failed.discard(name)
        self._tried.discard(name)
        self._ended.pop(name, None)
