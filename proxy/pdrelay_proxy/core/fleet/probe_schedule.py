"""Which engines are probed next, and how: in time, however many are gone, and at a rate that fits
the fleet.

An engine that is gone can hold a probe until its timeout. So engines that have missed a probe have
places of their own, and those that were slow to fail are asked less and less often. The most
overdue engine comes first.

Where several routers hear each other, each engine has a few of them that probe it in each interval.
The others probe it once a minute, and at once when one of these says that it has missed a probe.

An engine that answers requests well is not probed meanwhile, and one without requests is probed
seldom where the kubelet probes it, too: a pod that is Ready (docs/routing.md).

A whole probe asks what an engine is, too: its models and its version. In a large fleet most probes
of engines that live ask no more than whether they do.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.core.model import InstanceId, Role

_DRAIN_S: Final = 0.5  # seconds between two probes of an engine that is drained
# seconds between two probes of an engine that is broken or not up yet, at least
_AWAY_S: Final = 1.0
_AWAY_MOST_S: Final = 15.0  # and at most
_AWAY_RATE: Final = 20  # probes a second of engines that are away, about
# a probe that fails after so long costs a place: the engine is asked less often
_SLOW_S: Final = 1.0
# The shares of the interval after which an engine is due, at random between them, for routers must
# not probe in step. The rest is for two ticks (of a twentieth of the interval at most) and the wait
# for a place: so a living engine is probed in each interval, and one that is gone is found within
# an interval and its timeouts.
_SOONEST: Final = 0.7
_JITTER: Final = 0.15
# times the usual pause, for a pod without requests: the kubelet asks it, too
_READY_PODS: Final = 3.0
# intervals between two probes of an engine that answers requests, at most: they tell its models
_SERVING_MOST: Final = 6.0
# seconds between two probes of an engine that other routers watch: half of it at least
_OTHERS_S: Final = 60.0
_LEAST_PLACES: Final = 16  # of each kind
_MOST_PLACES: Final = 512
# engines for each place: a sixth of a fleet can go at once, and the others are still probed
_LIVING_SHARE: Final = 6
_AWAY_SHARE: Final = 8
_LEAST_RATE: Final = 64.0  # probes begun in a second
_SPARE_RATE: Final = 1.5  # times what the interval takes
_WHOLE_RATE: Final = 50.0  # whole probes a second of engines that live, about: three requests each
# and up to 1.5 times the usual pause, at random: a fleet is added in one moment
_WHOLE_SOONEST: Final = 0.5


def keeps_blocks(member: Member) -> bool:
    """Tell whether an engine is asked what it keeps for decode engines, not whether it lives."""
    return member.life.state is HealthState.DRAINING and member.as_role(Role.PREFILL) is not None


class OtherProbes(Protocol):
    """Knows which engines other routers probe, and what these say; they hear of this router's."""

    def watches(self, name: InstanceId, /) -> bool:
        """Tell whether this router probes an engine in each interval."""
        ...

    def missed_at(self, name: InstanceId, /) -> float | None:
        """Return since when an engine does not answer another router; None: it answers all."""
        ...

    def is_second_miss(self, name: InstanceId, /, *, begun: float) -> bool:
        """Return whether a failed probe is the second, for another router has reported one."""
        ...

    def note(self, name: InstanceId, /, *, is_missing: bool) -> None:
        """An engine has failed a probe that answered before, or answers again."""
        ...


@dataclass(slots=True)
class _ProbeState:
    begun: float = -math.inf
    is_waiting: bool = False  # for a place
    whole_at: float = -math.inf  # when the next whole probe is due
    stretch: float = 1.0
    slow_failures: int = 0  # in a row


class ProbeSchedule:
    """The turns of all engines. Times are seconds of a clock that only rises."""

    def __init__(
        self, interval_s: float, chance: Callable[[], float], others: OtherProbes | None = None
    ) -> None:
        self._interval_s = interval_s  # 0: only engines that are drained are probed
        self._chance = chance  # 0 to 1
        self._others = others  # None: no other routers are known
        self._probes = dict[InstanceId, _ProbeState]()
        self._waiting = {True: deque[Member](), False: deque[Member]()}  # by whether they are away
        # likewise: those that are probed now, and hold a place
        self._active = dict[InstanceId, bool]()
        self._begun = 0.0  # probes of this moment and a little before; time takes from it
        self._at = -math.inf
        # the same for engines that are away, which keeps their probes at a bounded rate
        self._away_s = _AWAY_S

    def know(self, members: Sequence[Member]) -> None:
        """Take these for all engines there are."""
        self._probes = {
            member.instance.id: self._probes.get(member.instance.id) or _ProbeState()
            for member in members
        }
        missing = sum([_is_missing(member) for member in members])
        self._away_s = min(_AWAY_MOST_S, max(_AWAY_S, missing / _AWAY_RATE))

    def due(self, members: Sequence[Member], *, now: float) -> Sequence[tuple[float, Member]]:
        """Return those to probe, and since when, of some engines that it knows."""
        due = list[tuple[float, Member]]()
        for member in members:
            name = member.instance.id
            probe = self._probes[name]
            pause = self._pause(member)
            if (
                pause is not None
                and now >= probe.begun + pause
                and not probe.is_waiting
                and name not in self._active
            ):
                due.append((probe.begun + pause, member))
        return due

    def begin_due(self, due: Sequence[tuple[float, Member]], *, now: float) -> Sequence[Member]:
        """Return the engines to probe now, and count their probes as begun; ``ended`` ends them.

        Those that find no place wait, the most overdue first, for ``begin``.
        """
        for _, member in sorted(due, key=lambda due_member: due_member[0]):
            self._probes[member.instance.id].is_waiting = True
            self._waiting[_is_missing(member)].append(member)
        return self.begin(now=now)

    def begin(self, *, now: float) -> Sequence[Member]:
        """Return as many of those that wait as there are places for, and no more in a short time
        than is needed.
        """
        count = len(self._probes)
        rate = max(
            _LEAST_RATE, _SPARE_RATE * count / self._interval_s if self._interval_s > 0 else 0.0
        )
        self._begun = max(0.0, self._begun - rate * (now - self._at))
        self._at = now
        active = sum(self._active.values())
        places = {True: _places(count, _AWAY_SHARE) - active}
        places[False] = _places(count, _LIVING_SHARE) - (len(self._active) - active)
        begun = list[Member]()
        for is_away, waiting in self._waiting.items():
            while waiting and places[is_away] > 0 and self._begun < rate:
                member = waiting.popleft()
                name = member.instance.id
                if name not in self._probes:  # it was forgotten while it waited
                    continue
                probe = self._probes[name]
                probe.begun = now
                probe.is_waiting = False
                probe.stretch = _SOONEST + _JITTER * self._chance()
                self._active[name] = is_away
                self._begun += 1
                places[is_away] -= 1
                begun.append(member)
        return begun

    def is_whole(self, member: Member, *, now: float) -> bool:
        """Tell whether a probe that begins asks what the engine is; it is taken to do so.

        It does unless the engine has answered all along, for then it is the same process.
        """
        probe = self._probes.get(member.instance.id)
        if probe is None:  # it was forgotten when its probe was about to begin
            return False
        if (
            member.life.state is HealthState.HEALTHY
            and member.life.misses == 0
            and not member.may_be_new
            and now < probe.whole_at
        ):
            return False
        probe.whole_at = now + len(self._probes) / _WHOLE_RATE * (_WHOLE_SOONEST + self._chance())
        return True

    def ended(self, name: InstanceId, *, failed: bool, now: float) -> None:
        """Note that a probe is over: there is a place for another one."""
        self._active.pop(name, None)
        probe = self._probes.get(name)
        if probe is not None:
            if failed:
                probe.whole_at = -math.inf
            is_slow = failed and now - probe.begun >= _SLOW_S
            probe.slow_failures = probe.slow_failures + 1 if is_slow else 0

    def _pause(self, member: Member) -> float | None:
        """Return the seconds from one probe's beginning to the next; None: it is not probed."""
        probe = self._probes[member.instance.id]
        back_off = (
            min(_AWAY_MOST_S, _AWAY_S * 2.0 ** min(probe.slow_failures - 1, 10))
            if probe.slow_failures
            else 0.0
        )
        if keeps_blocks(member):
            return max(_DRAIN_S, back_off)
        if self._interval_s <= 0:
            return None
        pause_s = self._pause_by_others(member, probe)
        if pause_s is not None:
            return pause_s
        if not _is_missing(member):
            return self._living_pause(member, probe)
        least = min(self._interval_s, _AWAY_S)
        if not member.life.is_away:  # the second miss decides, so it is asked again soon
            return 0.0 if probe.slow_failures else least
        return max(least if self._away_s <= _AWAY_S else self._away_s, back_off)

    def _living_pause(self, member: Member, probe: _ProbeState) -> float:
        """Return the pause of one that answers probes, or requests, which is as good."""
        pause = self._interval_s * probe.stretch
        if not member.life.is_well:
            return pause
        if member.origin.source is EngineSource.PODS and not member.load.in_flight:
            return pause * _READY_PODS
        return min(
            max(pause, member.life.served_at - probe.begun + pause),
            self._interval_s * _SERVING_MOST,
        )

    def _pause_by_others(self, member: Member, probe: _ProbeState) -> float | None:
        """Return the pause that follows from what other routers do and say; None: it is this
        router's to probe.
        """
        if self._others is None:
            return None
        name = member.instance.id
        missed_at = self._others.missed_at(name)
        if missed_at is not None and not _is_missing(member):
            return 0.0 if probe.begun < missed_at else self._interval_s * probe.stretch
        # What is away for both, or well for both, is left to those that watch it. One that holds
        # probes until their timeout is still probed as usual: it may hang, and keep requests
        # (HUNG_S of io/probes/prober.py).
        is_left = (
            not probe.slow_failures and member.life.is_away
            if missed_at is not None
            else not _is_missing(member)
        )
        if is_left and not self._others.watches(name):
            # 0 to 1: a hundred routers may have started together
            drawn = (probe.stretch - _SOONEST) / _JITTER
            return max(self._interval_s, _OTHERS_S) * (1.0 + drawn) / 2.0
        return None


def _is_missing(member: Member) -> bool:
    return member.life.is_away or member.life.misses > 0


def _places(count: int, share: int) -> int:
    return min(_MOST_PLACES, max(_LEAST_PLACES, math.ceil(count / share)))
