"""The events of the last five minutes, by the second, in a fixed amount of memory, for the status
page.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# sum() of floats fails where this is compiled: mypyc takes its result for an int
from math import fsum
from typing import Final

from pdrelay_proxy.core.model import InstanceId, RequestId
from pdrelay_proxy.core.schemas import Bin

SPAN_S: Final = 300  # seconds that are kept
_FAILURES: Final = 50  # failures that are kept
_NEVER: Final = -SPAN_S
_QUIET: Final = Bin(0, 0, None, None)


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A failure.

    It has only public facts: no address, no text of an engine.
    """

    at: float  # seconds of the caller's clock
    request: RequestId
    where: str  # an instance's id, or the path of the request
    reason: str


class RollingSeries:
    """Counts per second for the last :data:`SPAN_S` seconds.

    An event may be added late, in any of these seconds.

    The numbers are in arrays, which the garbage collector does not traverse and which are added up
    in C: an object for each second would make a million objects with 2,000 engines, and a full
    collection stopped the router for 70 ms.
    """

    def __init__(self) -> None:
        self._latest = _NEVER  # the second of the latest event
        # By the second, modulo SPAN_S; seconds without events are 0.
        self._counts = array("I", [0]) * SPAN_S
        self._failed = array("I", [0]) * SPAN_S
        self._totals = array("d", [0.0]) * SPAN_S
        self._worst = array("d", [0.0]) * SPAN_S

    def add_all(self, values: Sequence[float], *, now: float, failed: bool = False) -> None:
        """Count some events, at least one, with their values, which are not negative."""
        stamp = int(now)
        if stamp > self._latest:
            self._begin(stamp)
        elif stamp <= self._latest - SPAN_S:
            return
        place = stamp % SPAN_S
        self._counts[place] += len(values)
        if failed:
            self._failed[place] += len(values)
        self._totals[place] += fsum(values)
        self._worst[place] = max(self._worst[place], *values)

    def _begin(self, stamp: int) -> None:
        """Clear the seconds since the latest event, whose entries are SPAN_S seconds old."""
        for second in range(max(self._latest + 1, stamp + 1 - SPAN_S), stamp + 1):
            place = second % SPAN_S
            self._counts[place] = self._failed[place] = 0
            self._totals[place] = self._worst[place] = 0.0
        self._latest = stamp

    def bins(self, *, now: float, step_s: int) -> tuple[Bin, ...]:
        """Return the last five minutes in steps of so many whole seconds, the oldest first."""
        end = int(now) + 1
        return tuple(self._sum(first, first + step_s) for first in range(end - SPAN_S, end, step_s))

    def last(self, seconds: int, *, now: float) -> Bin:
        """Return the last seconds as one bin, with the present one; at most :data:`SPAN_S`."""
        end = int(now) + 1
        return self._sum(end - seconds, end)

    def _sum(self, first: int, end: int) -> Bin:
        """Add up some of the last SPAN_S seconds; those after the latest event are empty."""
        end = min(end, self._latest + 1)
        if end <= first:
            return _QUIET
        begin = first % SPAN_S
        stop = (end - 1) % SPAN_S + 1
        parts = [(begin, stop)] if begin < stop else [(begin, SPAN_S), (0, stop)]
        count = sum([sum(self._counts[a:b]) for a, b in parts])
        if count == 0:
            return _QUIET
        failed = sum([sum(self._failed[a:b]) for a, b in parts])
        mean = fsum([fsum(self._totals[a:b]) for a, b in parts]) / count
        return Bin(count, failed, mean, max([max(self._worst[a:b]) for a, b in parts]))


def _by_instance() -> defaultdict[InstanceId, RollingSeries]:
    return defaultdict(RollingSeries)


@dataclass(slots=True)
class RecentStats:
    """The series of one router. Durations are seconds."""

    requests: RollingSeries = field(default_factory=RollingSeries)  # seconds a request took
    ttft: RollingSeries = field(default_factory=RollingSeries)  # seconds until a stream began
    # seconds between a prefill answer and its decode leg
    gaps: RollingSeries = field(default_factory=RollingSeries)
    # seconds a leg took
    legs: defaultdict[InstanceId, RollingSeries] = field(default_factory=_by_instance)
    # until its answer
    answers: defaultdict[InstanceId, RollingSeries] = field(default_factory=_by_instance)
    # the latest first
    failures: deque[FailureEvent] = field(default_factory=lambda: deque(maxlen=_FAILURES))

    def failed(self, request: RequestId, where: str, reason: str, *, now: float) -> None:
        """Keep a failure; the oldest one is dropped."""
        self.failures.appendleft(FailureEvent(now, request, where, reason))

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Drop instances that are no longer known."""
        for rings in (self.legs, self.answers):
            for gone in rings.keys() - instances:
                del rings[gone]
