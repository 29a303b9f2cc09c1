"""Counts requests together that are alike in all labels of metrics: many at once cost less."""

from typing import Final, TypeAlias

from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.model import LegOrder
from pdrelay_proxy.core.protocol.kv_transfer_check import Arrival
from pdrelay_proxy.core.recent_stats import RecentStats
from pdrelay_proxy.core.request_record import PromptRecord, RequestOutcome, RequestRecord

_STREAM_ABORTED: Final = RequestOutcome.STREAM_ABORTED
_SERVER_ERROR: Final = RequestOutcome.SERVER_ERROR
_AT_ONCE: Final = LegOrder.CONCURRENT
_UNKNOWN: Final = Arrival.UNKNOWN
_Key: TypeAlias = tuple[str, int, bool, str | None, str | None, str | None, bool, bool]


class RequestKind:
    """The numbers of the requests that are alike in all labels, until they are added up.

    Times are seconds.
    """

    __slots__ = (
        "decode",
        "durations",
        "has_transfer",
        "is_failed",
        "is_part",
        "mode",
        "outcome",
        "path",
        "reason",
        "ttft",
        "unqueued",
    )

    def __init__(self, path: str, record: RequestRecord) -> None:
        self.path = path
        self.outcome = record.outcome
        self.is_part = isinstance(record, PromptRecord)
        self.is_failed = not self.is_part and (
            self.outcome is _SERVER_ERROR or self.outcome is _STREAM_ABORTED
        )
        self.mode = record.mode
        self.reason: str = record.single_reason or "none"
        self.decode = None if record.decode is None else record.decode.instance
        # A push whose legs went out at once may tell in its answer whether the KV cache arrived.
        self.has_transfer = (
            record.prefill is not None and record.status == 200 and record.push is not _AT_ONCE
        )
        self.durations: list[float] = []
        self.ttft: list[float] = []
        self.unqueued = 0  # requests that were admitted at once

    def add_up(self, counters: Counters, recent: RecentStats, *, now: float) -> None:
        """Put them where they are read."""
        count = len(self.durations)
        if not count:
            return
        if self.decode is not None:
            counters.routed[self.mode, self.reason] += count
            if self.has_transfer:
                counters.transfers[self.decode, _UNKNOWN] += count
        if not self.is_part:
            counters.requests[self.path, self.outcome] += count
            counters.durations.histogram((self.path, self.outcome)).observe_all(self.durations)
            recent.requests.add_all(self.durations, now=now, failed=self.is_failed)
            if self.unqueued:
                counters.queue_times.histogram((self.path,)).counts[0] += self.unqueued
            if self.ttft:
                counters.ttft.histogram((self.path,)).observe_all(self.ttft)
                recent.ttft.add_all(self.ttft, now=now)
        self.ttft.clear()
        self.durations.clear()
        self.unqueued = 0


class RequestKinds:
    """All kinds of requests that a router has seen."""

    def __init__(self) -> None:
        self._kinds: dict[_Key, RequestKind] = {}

    def kind_of(self, record: RequestRecord, path: str) -> RequestKind:
        """Return the kind of a request that is over; ``path``: the label of its path."""
        decode = None if record.decode is None else record.decode.instance
        is_part = isinstance(record, PromptRecord)
        has_prefill = record.prefill is not None
        # Its outcome follows from its status and whether there was an error.
        key = (
            path,
            record.status,
            record.error is None,
            record.single_reason,
            decode,
            record.push,
            has_prefill,
            is_part,
        )
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = RequestKind(path, record)
        return kind

    def add_up(self, counters: Counters, recent: RecentStats, *, now: float) -> None:
        """Put what was counted where it is read."""
        for kind in self._kinds.values():
            kind.add_up(counters, recent, now=now)

    def clear(self) -> None:
        """Forget the kinds, which name instances; what was counted has been added up."""
        self._kinds.clear()
