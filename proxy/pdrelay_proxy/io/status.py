"""The numbers of the status page: the present state, and the last five minutes."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.fleet.fleet_warnings import FleetWarnings
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.one_line import shortened
from pdrelay_proxy.core.recent_stats import SPAN_S, RecentStats
from pdrelay_proxy.core.routing.fleet_groups import EngineGroup, fleet_groups_in_steps
from pdrelay_proxy.core.routing.pair_preference import PairPreference
from pdrelay_proxy.core.schemas.feature_status import FeatureStatus
from pdrelay_proxy.io.build import find_build
from pdrelay_proxy.io.request_path.telemetry import Telemetry

_STEP_S: Final = 5
_MINUTE_S: Final = 60
# characters of an id, enough to find it in the log: "pdrelay-" and eight digits
_ID_SHOWN: Final = 13
_AT_ONCE: Final = 6  # engines in one step


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
    legs_per_s: float  # legs that ended, last minute
    failed: int  # legs, last five minutes
    answer_s: float | None  # mean of the last five minutes


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The queue; ``refused`` since the start."""

    waiting: int
    admitted: int
    refused: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure."""

    ago_s: float
    request: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All numbers of the page."""

    version: str  # with the commit, and whether the request path is compiled
    uptime_s: float
    last_minute: Minute
    series: Series
    instances: list[Engine]
    warnings: Sequence[str]  # problems of the fleet as a whole
    groups: Sequence[EngineGroup]  # of engines that fit each other; empty: all of them do
    features: Sequence[FeatureStatus]  # parts that features add
    queue: QueueStatus
    failures: list[Failed]


class Status:
    """Collects the numbers on request."""

    def __init__(
        self,
        telemetry: Telemetry,
        engines: Registry,
        admission: Admission,
        clock: Callable[[], float],
        *,
        may_be_alone: Callable[[], bool] = lambda: True,
        features: Sequence[Callable[[], FeatureStatus | None]] = (),
        warnings: FleetWarnings | None = None,
        preference: PairPreference | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._engines = engines
        self._preference = preference
        self._admission = admission
        self._clock = clock  # the clock of ``telemetry``
        # whether the present settings let decode engines serve alone
        self._may_be_alone = may_be_alone
        self._features = features
        self._warnings = warnings or FleetWarnings()
        self._start = clock()

    def in_steps(self) -> Generator[None, None, Snapshot]:
        """Collect the present numbers in steps of some engines, of about a millisecond each."""
        now = self._clock()
        recent = self._telemetry.recent
        admission = self._admission
        members = self._engines.members()
        in_flight = self._telemetry.in_flight
        self._telemetry.keep(frozenset(member.instance.id for member in members))
        yield
        engines = list[Engine]()
        for number, member in enumerate(members):
            if number % _AT_ONCE == 0:
                yield
            engines.append(_engine(member, recent, in_flight.get(member.instance.id, 0), now=now))
        yield
        groups = yield from fleet_groups_in_steps(
            self._engines, self._preference, may_be_alone=self._may_be_alone()
        )
        yield
        requests = recent.requests.last(_MINUTE_S, now=now)
        ttft, gaps = (ring.last(_MINUTE_S, now=now) for ring in (recent.ttft, recent.gaps))
        return Snapshot(
            version=str(find_build()),
            uptime_s=self._clock() - self._start,
            last_minute=Minute(requests.count / _MINUTE_S, requests.failed, ttft.mean, gaps.mean),
            series=_series(recent, now=now),
            instances=engines,
            warnings=self._warnings.texts,
            groups=groups,
            features=[
                feature_status for part in self._features if (feature_status := part()) is not None
            ],
            queue=QueueStatus(
                admission.waiting, admission.admitted, sum(admission.refused.values())
            ),
            failures=[
                Failed(
                    now - failure.at,
                    shortened(failure.request, _ID_SHOWN),
                    failure.where,
                    failure.reason,
                )
                for failure in recent.failures
            ],
        )


def _series(recent: RecentStats, *, now: float) -> Series:
    requests, ttft, gaps = (
        ring.bins(now=now, step_s=_STEP_S) for ring in (recent.requests, recent.ttft, recent.gaps)
    )
    return Series(
        _STEP_S,
        [step.count for step in requests],
        [step.failed for step in requests],
        [step.mean for step in ttft],
        [step.worst for step in ttft],
        [step.mean for step in gaps],
        [step.worst for step in gaps],
    )


def _engine(member: Member, recent: RecentStats, in_flight: int, *, now: float) -> Engine:
    instance = member.instance
    legs = recent.legs.get(instance.id)
    answers = recent.answers.get(instance.id)
    return Engine(
        id=instance.id,
        role=member.role if member.turn is None else f"{member.role}, to {member.turn.to}",
        state=member.life.state,
        why=member.life.why,
        in_flight=in_flight,
        legs_per_s=0.0 if legs is None else legs.last(_MINUTE_S, now=now).count / _MINUTE_S,
        failed=0 if legs is None else legs.last(SPAN_S, now=now).failed,
        answer_s=None if answers is None else answers.last(SPAN_S, now=now).mean,
    )
