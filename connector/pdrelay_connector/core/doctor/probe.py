"""Measures one operation (READ or WRITE) on the memory of the other end, over a transfer agent.

Three phases: one small transfer, which opens UCX's connection; small transfers one after the other,
for the latency; transfers of more and more descriptors, for the throughput. Descriptors lie in
opposite orders at both ends, so that none can be merged with its neighbour: they are as scattered
as the blocks of a cache.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import numpy as np

from pdrelay_connector.core.doctor.examination import Measure, Measurement, shortened
from pdrelay_connector.core.ids import XferId
from pdrelay_connector.core.layout.transfer_plan import HIGHEST_END, Spans
from pdrelay_connector.core.messages import RankInfo
from pdrelay_connector.core.ports import TransferAgent, XferEnded, XferOutcome
from pdrelay_connector.errors import ConnectorError, ProtocolViolation

SMALLEST: Final = 64  # bytes of a transfer whose latency is measured
LATENCIES: Final = 16  # of them
MOST_DESCRIPTORS: Final = 4096  # of one transfer: a prompt of 65,536 tokens in one layer
STEADY: Final = 0.05  # s that a transfer takes before it gets no more descriptors


class _Phase(Enum):
    MEETING = auto()
    LATENCY = auto()
    THROUGHPUT = auto()


@dataclass(slots=True)
class _Totals:
    """The transfers of one size."""

    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    posting: float = 0.0

    def add(self, ended: XferEnded) -> None:
        self.bytes += ended.bytes
        self.seconds += ended.seconds
        self.descriptors += ended.descriptors
        self.posting += ended.posting


@dataclass(frozen=True, slots=True)
class ScratchPair:
    """The scratch memory of both ends, as this end reaches it."""

    handle: str  # of the transfer agent
    remote: int  # addresses
    local: int
    bytes: int  # of the smaller one

    @classmethod
    def from_regions(cls, handle: str, remote: RankInfo, local: RankInfo) -> "ScratchPair":
        """Raises :exc:`~pdrelay_connector.errors.ProtocolViolation`: the memory is impossible."""
        theirs = remote.regions[0]
        ours = local.regions[0]
        sizes = [region.width * region.count for region in (theirs, ours)]
        if theirs.base + sizes[0] > HIGHEST_END or min(sizes) < SMALLEST:
            raise ProtocolViolation(
                f"memory of {sizes[0]} bytes at {theirs.base:#x} cannot be measured with"
            )
        return cls(handle, theirs.base, ours.base, min(sizes))

    def spans(self, count: int, size: int) -> Spans:
        """Return ``count`` descriptors of ``size`` bytes; both must fit."""
        places = np.arange(count, dtype=np.int64) * size
        return np.stack(
            [self.remote + places, self.local + places[::-1], np.full_like(places, size)], axis=1
        )


class Probe:
    """One measurement under way. :meth:`on` and :meth:`advance` return its result once."""

    def __init__(
        self, agent: TransferAgent, memory: ScratchPair, order: Measure, *, now: float
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._order = order
        self._deadline = now + order.timeout
        self._phase = _Phase.MEETING
        self._size = min(order.block_bytes, memory.bytes)
        self._count = 1
        self._meeting = 0.0
        self._latencies: list[float] = []
        self._totals = _Totals()
        self._steady_until: float | None = None  # absent before the throughput is measured
        self._xfer: XferId | None = None  # absent while none is in flight

    def start(self) -> Measurement | None:
        """Post the first transfer; return a result if that fails."""
        return self._post(1, SMALLEST)

    def on(self, ended: Sequence[XferEnded], *, now: float) -> Measurement | None:
        """Go on after a transfer."""
        for transfer in ended:
            if transfer.xfer != self._xfer:
                continue  # of an earlier measurement that was given up
            self._xfer = None
            if transfer.outcome is not XferOutcome.DONE:
                return self._failed(f"NIXL: {transfer.reason}")
            return self._next(transfer, now)
        return None

    def advance(self, *, now: float) -> Measurement | None:
        """Give up at the deadline."""
        if now < self._deadline or self._xfer is None:
            return None
        self._agent.cancel(self._xfer)
        if self._totals.seconds:
            return self._done()
        what = "the first transfer, of 64 bytes," if self._phase is _Phase.MEETING else "a transfer"
        return self._failed(f"{what} did not end within {self._order.timeout:g} s")

    def _next(self, ended: XferEnded, now: float) -> Measurement | None:
        match self._phase:
            case _Phase.MEETING:
                self._meeting = ended.seconds
                self._phase = _Phase.LATENCY
            case _Phase.LATENCY:
                self._latencies.append(ended.seconds)
                if len(self._latencies) == LATENCIES:
                    self._phase = _Phase.THROUGHPUT
                    self._steady_until = now + self._order.seconds
            case _Phase.THROUGHPUT:
                self._totals.add(ended)
                if self._steady_until is not None and now >= self._steady_until:
                    return self._done()
                self._grow(ended)
        if self._phase is _Phase.THROUGHPUT:
            return self._post(self._count, self._size)
        return self._post(1, SMALLEST)

    def _grow(self, ended: XferEnded) -> None:
        """Double the descriptors until a transfer takes long; earlier numbers do not count."""
        most = min(MOST_DESCRIPTORS, self._memory.bytes // self._size)
        if ended.seconds < STEADY and self._count < most:
            self._count = min(2 * self._count, most)
            self._totals = _Totals()

    def _post(self, count: int, size: int) -> Measurement | None:
        start = self._agent.read if self._order.operation == "READ" else self._agent.write
        try:
            self._xfer = start(self._memory.handle, self._memory.spans(count, size))
        except ConnectorError as exc:
            return self._failed(str(exc))
        return None

    def _failed(self, reason: str) -> Measurement:
        return Measurement(self._order.operation, self._size, failure=shortened(reason))

    def _done(self) -> Measurement:
        totals = self._totals
        return Measurement(
            self._order.operation,
            self._size,
            bytes=totals.bytes,
            seconds=totals.seconds,
            descriptors=totals.descriptors,
            posting_seconds=totals.posting,
            latency_seconds=statistics.median(self._latencies),
            meeting_seconds=self._meeting,
        )
