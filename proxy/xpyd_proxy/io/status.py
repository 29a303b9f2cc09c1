"""The numbers of the status page: what the router knows now, and what the last five minutes were like."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from xpyd_proxy.core.model import InstanceId
from xpyd_proxy.core.ports import Census, Queue, Standing
from xpyd_proxy.core.pulse import SPAN_S, Bin, Mishap, Ring
from xpyd_proxy.io.sight import Sight

_STEP_S: Final = 5
_MINUTE_S: Final = 60
_QUIET: Final = Bin(0, 0, None, None)


@dataclass(frozen=True, slots=True)
class Minute:
    """The last minute; means are seconds, None where nothing happened."""

    requests_per_s: float
    failed: int
    ttft_s: float | None
    gap_s: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """The last five minutes in steps, the oldest first; times are seconds."""

    step_s: int
    requests: list[int]
    failed: list[int]
    ttft_mean_s: list[float | None]
    ttft_worst_s: list[float | None]
    gap_mean_s: list[float | None]
    gap_worst_s: list[float | None]


@dataclass(frozen=True, slots=True)
class Engine:
    """One instance."""

    id: str
    role: str
    state: str
    why: str
    in_flight: int
    legs_per_s: float  # of those that ended, last minute
    failed: int  # legs, last five minutes
    answer_s: float | None  # mean of the last five minutes


@dataclass(frozen=True, slots=True)
class Waiting:
    """The queue; ``refused`` since the start."""

    waiting: int
    admitted: int
    refused: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Something that went wrong."""

    ago_s: float
    request: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at once."""

    uptime_s: float
    last_minute: Minute
    series: Series
    instances: list[Engine]
    queue: Waiting | None
    failures: list[Failed]


class Status:
    """Puts the numbers together when somebody asks for them."""

    def __init__(self, sight: Sight, census: Census, clock: Callable[[], float], queue: Queue | None = None) -> None:
        self._sight = sight
        self._census = census
        self._clock = clock  # the one of ``sight``
        self._queue = queue
        self._start = clock()

    def now(self) -> Snapshot:
        """Return what is known now."""
        now, pulse = self._clock(), self._sight.pulse
        standings = self._census.standings()
        self._sight.keep(frozenset(standing.instance.id for standing in standings))
        return Snapshot(
            uptime_s=now - self._start,
            last_minute=self._minute(now),
            series=self._series(now),
            instances=[self._engine(standing, now) for standing in standings],
            queue=None if self._queue is None else _waiting(self._queue),
            failures=[_failed(mishap, now) for mishap in pulse.mishaps],
        )

    def _minute(self, now: float) -> Minute:
        pulse = self._sight.pulse
        requests, ttft, gap = (ring.last(_MINUTE_S, now=now) for ring in (pulse.requests, pulse.ttft, pulse.gaps))
        return Minute(requests.count / _MINUTE_S, requests.failed, ttft.mean, gap.mean)

    def _series(self, now: float) -> Series:
        pulse = self._sight.pulse
        requests, ttft, gap = (ring.bins(now=now, step_s=_STEP_S) for ring in (pulse.requests, pulse.ttft, pulse.gaps))
        return Series(
            _STEP_S,
            [one.count for one in requests],
            [one.failed for one in requests],
            [one.mean for one in ttft],
            [one.worst for one in ttft],
            [one.mean for one in gap],
            [one.worst for one in gap],
        )

    def _engine(self, standing: Standing, now: float) -> Engine:
        instance, pulse = standing.instance, self._sight.pulse
        ended = _last(pulse.legs, instance.id, _MINUTE_S, now)
        return Engine(
            id=instance.id,
            role=instance.role,
            state=standing.state,
            why=standing.why,
            in_flight=self._sight.legs.in_flight.get(instance.id, 0),
            legs_per_s=ended.count / _MINUTE_S,
            failed=_last(pulse.legs, instance.id, SPAN_S, now).failed,
            answer_s=_last(pulse.answers, instance.id, SPAN_S, now).mean,
        )


def _last(rings: Mapping[InstanceId, Ring], instance: InstanceId, seconds: int, now: float) -> Bin:
    return rings[instance].last(seconds, now=now) if instance in rings else _QUIET


def _waiting(queue: Queue) -> Waiting:
    return Waiting(queue.waiting, queue.admitted, sum(queue.refused.values()))


def _failed(mishap: Mishap, now: float) -> Failed:
    return Failed(now - mishap.at, mishap.request, mishap.where, mishap.reason)
