"""What happened in the last five minutes, second by second, in a fixed amount of memory: the status page draws it."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from xpyd_proxy.core.model import InstanceId, RequestId
from xpyd_proxy.core.schemas import Bin

SPAN_S: Final = 300  # seconds that are remembered
_FAILURES: Final = 50  # failures that are remembered
_NEVER: Final = -1


@dataclass(slots=True)
class _Second:
    stamp: int = _NEVER
    count: int = 0
    failed: int = 0
    total: float = 0.0
    worst: float = 0.0


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """Something that went wrong. It says no more than anybody may know: no address, no words of an engine."""

    at: float  # seconds, on the clock of whoever reported it
    request: RequestId
    where: str  # an instance's id, or the path of the request
    reason: str


class RollingSeries:
    """Counts per second for the last :data:`SPAN_S` seconds. Time never runs backwards."""

    def __init__(self) -> None:
        self._seconds = [_Second() for _ in range(SPAN_S)]

    def add_all(self, values: Sequence[float], *, now: float, failed: bool = False) -> None:
        """Count some events, and their values."""
        stamp = int(now)
        place = stamp % SPAN_S
        second = self._seconds[place]
        if second.stamp != stamp:
            second = self._seconds[place] = _Second(stamp)
        second.count += len(values)
        second.failed += len(values) * failed
        second.total += sum(values)
        second.worst = max(second.worst, *values)

    def bins(self, *, now: float, step_s: int) -> tuple[Bin, ...]:
        """Return the last five minutes in steps of so many whole seconds, the oldest first."""
        end = int(now) + 1
        return tuple(self._sum(range(first, first + step_s)) for first in range(end - SPAN_S, end, step_s))

    def last(self, seconds: int, *, now: float) -> Bin:
        """Return the last seconds as one, the current one included; at most :data:`SPAN_S`."""
        end = int(now) + 1
        return self._sum(range(end - seconds, end))

    def _sum(self, stamps: Iterable[int]) -> Bin:
        found = [second for stamp in stamps if (second := self._seconds[stamp % SPAN_S]).stamp == stamp]
        count = sum(second.count for second in found)
        mean = sum(second.total for second in found) / count if count else None
        worst = max(second.worst for second in found) if count else None
        return Bin(count, sum(second.failed for second in found), mean, worst)


def _by_instance() -> defaultdict[InstanceId, RollingSeries]:
    return defaultdict(RollingSeries)


@dataclass(slots=True)
class RecentStats:
    """The rings of one router. Durations are seconds."""

    requests: RollingSeries = field(default_factory=RollingSeries)  # seconds a request took
    ttft: RollingSeries = field(default_factory=RollingSeries)  # seconds until a stream began
    gaps: RollingSeries = field(default_factory=RollingSeries)  # seconds between a prefill answer and its decode leg
    legs: defaultdict[InstanceId, RollingSeries] = field(default_factory=_by_instance)  # seconds a leg took
    answers: defaultdict[InstanceId, RollingSeries] = field(default_factory=_by_instance)  # until its answer
    failures: deque[FailureEvent] = field(default_factory=lambda: deque(maxlen=_FAILURES))  # the latest first

    def failed(self, request: RequestId, where: str, reason: str, *, now: float) -> None:
        """Remember a failure; the oldest one is forgotten."""
        self.failures.appendleft(FailureEvent(now, request, where, reason))

    def keep(self, instances: frozenset[InstanceId]) -> None:
        """Forget the instances that are no longer known."""
        for rings in (self.legs, self.answers):
            for gone in rings.keys() - instances:
                del rings[gone]
