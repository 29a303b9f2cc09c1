"""The loads that a worker's main thread waits for, and those that it has given up because the
transfer thread does not come back.

A call of NIXL may never return. No code can take its thread back, and nobody knows what it still
writes. So a load that is given up has failed, and its blocks stay quarantined until the thread has
reported its end.
"""

from collections.abc import Iterator

from pdrelay_connector.core.ids import EngineId, RequestId
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.results import BlocksReleased, LoadResult


class OverdueLoads:
    """Runs on the worker's main thread."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, EngineId] = {}
        self._given_up: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, order: LoadOrder) -> None:
        """Wait for a load."""
        self._waiting[order.request] = order.engine

    def give_up(self, reason: str) -> Iterator[tuple[EngineId, LoadResult]]:
        """Give all loads up, and yield their ends with the engines that they are from."""
        for request, engine in self._waiting.items():
            self._given_up.add(request)
            yield engine, LoadResult(request, reason, quarantined=True)
        self._waiting = {}

    def take(self, ended: LoadResult | BlocksReleased) -> LoadResult | BlocksReleased | None:
        """Take in what the transfer thread reports; return what it means by now."""
        if not isinstance(ended, LoadResult):
            self._given_up.discard(ended.request)
            return ended
        if ended.request not in self._given_up:
            self._waiting.pop(ended.request, None)
            return ended
        if ended.quarantined:  # BlocksReleased follows
            return None
        self._given_up.discard(ended.request)
        return BlocksReleased(ended.request)
