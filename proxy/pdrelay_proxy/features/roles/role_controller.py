"""Decides every few seconds whether an engine should change its role. Boring on purpose.

One engine changes at a time, and the next one only when the fleet has settled: after a cool-down,
and when the numbers of all engines are new. Earlier role changes come with each snapshot, so
another controller can go on where this one ended, and two of them choose the same engine.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading
from pdrelay_proxy.features.roles.role_split import (
    OTHER,
    Busy,
    Split,
    is_short,
    lacking,
    needed_split,
)
from pdrelay_proxy.features.roles.work_meter import DecodeWork, PrefillWork, RoleTargets, WorkMeter

HOUR_S: Final = 3600.0
_NAMED: Final = 3  # engines that a sentence names


class Verdict(StrEnum):
    """The result of one decision."""

    TURN = auto()  # an engine changes its role, or would in a dry run
    ASSIGN = auto()  # an engine that serves both roles takes one of them, or would
    BALANCED = auto()  # neither role lacks an engine
    # a role lacks an engine, and the other role cannot spare one: the fleet is too small
    SHORT = auto()
    UNKNOWN = auto()  # a number was not measured yet
    WAITING = auto()  # a role lacks an engine, but not for long enough
    COOLING = auto()  # the last role change is too recent
    TURNING = auto()  # an engine changes its role now
    SPENT = auto()  # the limit of role changes in an hour is reached
    BOUND = auto()  # the other role has no more engines than it must keep
    STUCK = auto()  # no engine of the other role can change
    ELSEWHERE = auto()  # another router decides


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """The limits of the controller."""

    min_prefill: int = 1
    min_decode: int = 1
    cooldown_s: float = 60.0  # between two role changes
    turns_per_hour: int = 6
    hold_s: float = 20.0  # a role must lack an engine for so long
    release_s: float = 300.0  # a role must need fewer engines for so long before fewer are wanted

    @property
    def least(self) -> Split:
        """Return the fewest engines of each role."""
        return Split(self.min_prefill, self.min_decode)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The serving engines, and earlier role changes."""

    readings: Sequence[EngineReading]  # of engines with one role that do not change it now
    turning: Sequence[InstanceId] = ()
    # when role changes began, by any controller; None: only this one decides
    changed_at: Sequence[float] | None = None
    queued_requests: int = 0  # in this router
    trouble: str = ""  # why no decision is possible
    leads: bool = True  # this router decides; others measure, so that they can take over at once
    leader: str = ""  # the router that decides, if it is another one
    serving_both: Sequence[EngineReading] = ()  # of engines of both roles, whatever role they show


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One engine, and its new role."""

    instance: InstanceId
    role: Role


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """A decision, and the numbers behind it."""

    verdict: Verdict
    why: str  # one sentence
    engines: Split
    prefill: PrefillWork | None  # None: not known
    decode: DecodeWork | None
    wanted: Split | None  # None: not known
    changes_in_hour: int  # in the last hour, this one included
    lacks: Role | None = None  # the role that should get an engine
    role_change: RoleChange | None = None


class RoleController:
    """Decides by consecutive snapshots. Times are seconds of a monotonic clock."""

    def __init__(self, targets: RoleTargets, limits: RoleLimits) -> None:
        self._targets = targets
        self._limits = limits
        self._meter = WorkMeter(targets)
        self._lacks: tuple[Role, float] | None = None  # which role lacks an engine, and since when
        self._needs = deque[tuple[float, Split]]()  # the recent needs, the oldest first
        self._own: tuple[float, ...] = ()  # the times of this controller's own decisions

    def decide(self, fleet: FleetSnapshot, *, now: float) -> RoleDecision:
        """Decide by the next snapshot."""
        self._meter.add_readings(fleet.readings)
        engines = Split(
            *(sum([reading.role is role for reading in fleet.readings]) for role in Role)
        )
        prefill = self._meter.prefill(fleet.queued_requests)
        decode = self._meter.decode(prefill)
        changed_at = self._changes_of_hour(fleet.changed_at, now)
        lacks: Role | None = None
        change: RoleChange | None = None
        if fleet.serving_both and not fleet.trouble:
            self._lacks = None
            verdict, why, change = self._assignment(fleet, engines, prefill, decode)
            lacks = None if change is None else change.role
        elif (
            (why := fleet.trouble or self._trouble(fleet, engines, prefill, decode, now))
            or prefill is None
            or decode is None
        ):
            self._lacks = None
            verdict = Verdict.UNKNOWN
        else:
            busy = Busy(prefill.busy, decode.busy, self._targets.utilisation)
            self._needs.append((now, needed_split(busy, self._limits.least)))
            lacks = lacking(busy, engines)
            verdict, why = self._verdict(fleet, engines, busy, lacks, changed_at, now=now)
            if verdict is Verdict.TURN and lacks is not None:
                # the same engine at all controllers, independent of loads
                first = min(_able(fleet.readings, OTHER[lacks]), key=_key)
                change = RoleChange(first.name, lacks)
                why = f"{change.instance} to {lacks}: {why}"
                changed_at = (*changed_at, now)
                self._lacks = None
                self._own = changed_at
        return RoleDecision(
            verdict,
            why,
            engines,
            prefill,
            decode,
            self._lasting_need(now),
            len(changed_at),
            lacks,
            change,
        )

    def _assignment(
        self,
        fleet: FleetSnapshot,
        engines: Split,
        prefill: PrefillWork | None,
        decode: DecodeWork | None,
    ) -> tuple[Verdict, str, RoleChange | None]:
        """Give an engine of both roles the role that needs it more.

        That does not count against turns_per_hour: the engine already serves this role, so no
        request waits for it. It costs what it has cached and streams of the other role.
        """
        if busy := self._idle_verdict(fleet):
            return *busy, None
        able = [reading for reading in fleet.serving_both if reading.may_turn]
        count = f"{len(fleet.serving_both)} engines serve both roles"
        if not able:
            return (
                Verdict.STUCK,
                f"{count}, and none of them can turn ({fleet.serving_both[0].name})",
                None,
            )
        least = self._limits.least
        others = len(fleet.serving_both) - 1
        # the other role must keep an engine
        roles = [role for role in Role if engines.for_role(OTHER[role]) + others]
        if not roles:
            return Verdict.BOUND, f"{able[0].name} serves both roles, and is the only engine", None
        work = (
            None
            if prefill is None or decode is None
            else Busy(prefill.busy, decode.busy, self._targets.utilisation)
        )

        def need(role: Role) -> tuple[float, float, int, bool]:
            missing = max(0, least.for_role(role) - engines.for_role(role))
            return (
                missing,
                work.pressure(role, engines) if work else 0.0,
                -engines.for_role(role),
                role is Role.DECODE,
            )

        role = max(roles, key=need)
        first = min(able, key=_key)
        state = f"{engines.prefill} engines are prefill and {engines.decode} are decode"
        return (
            Verdict.ASSIGN,
            f"{first.name} to {role}: {count}, {state}",
            RoleChange(first.name, role),
        )

    def _idle_verdict(self, fleet: FleetSnapshot) -> tuple[Verdict, str] | None:
        """Return why this controller must not decide now; None: it may."""
        if not fleet.leads:
            return Verdict.ELSEWHERE, f"{fleet.leader or 'another router'} decides"
        if fleet.turning:
            return Verdict.TURNING, f"{', '.join(fleet.turning[:_NAMED])} turns"
        return None

    def _changes_of_hour(self, shared: Sequence[float] | None, now: float) -> tuple[float, ...]:
        """Return the times of the last hour's role changes."""
        return tuple(
            [at for at in (self._own if shared is None else shared) if now - HOUR_S < at <= now]
        )

    def _trouble(
        self,
        fleet: FleetSnapshot,
        engines: Split,
        prefill: PrefillWork | None,
        decode: DecodeWork | None,
        now: float,
    ) -> str:
        """Return which numbers are missing; empty: none."""
        for role in Role:
            if not engines.for_role(role):
                return f"no {role} engine serves"
        if unknown := self._meter.unknown(fleet.readings, now):
            names = ", ".join(unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
            return f"{len(unknown)} engines are new in their role or do not show vLLM's metrics: {names}"
        for role, work in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            if work is None:
                return f"{role} engines have had too little to do to show their rate"
        return ""

    def _lasting_need(self, now: float) -> Split | None:
        """Return the largest need within release_s, by role; None: no need was known."""
        while self._needs and self._needs[0][0] < now - self._limits.release_s:
            self._needs.popleft()
        if not self._needs:
            return None
        return Split(*(max([need.for_role(role) for _, need in self._needs]) for role in Role))

    def _verdict(
        self,
        fleet: FleetSnapshot,
        engines: Split,
        busy: Busy,
        lacks: Role | None,
        changed_at: Sequence[float],
        *,
        now: float,
    ) -> tuple[Verdict, str]:
        if idle := self._idle_verdict(fleet):
            self._lacks = None
            return idle
        if lacks is None:
            self._lacks = None
            return Verdict.SHORT if is_short(busy, engines) else Verdict.BALANCED, _state(
                busy, engines
            )
        if self._lacks is None or self._lacks[0] is not lacks:
            self._lacks = (lacks, now)
        since = self._lacks[1]
        limits = self._limits
        state = f"{lacks} lacks an engine: {_state(busy, engines)}"
        giver = OTHER[lacks]
        checks = (
            (
                Verdict.BOUND,
                engines.for_role(giver) <= limits.least.for_role(giver),
                f"{giver} keeps {limits.least.for_role(giver)}",
            ),
            (
                Verdict.WAITING,
                now - since < limits.hold_s,
                f"since {now - since:.0f} of {limits.hold_s:g} s",
            ),
            (
                Verdict.SPENT,
                len(changed_at) >= limits.turns_per_hour,
                f"{len(changed_at)} engines have turned in the last hour",
            ),
            (
                Verdict.COOLING,
                bool(changed_at) and now - max(changed_at) < limits.cooldown_s,
                f"the last turn was less than {limits.cooldown_s:g} s ago",
            ),
            (Verdict.STUCK, not _able(fleet.readings, giver), f"no {giver} engine can turn"),
        )
        for verdict, holds, why in checks:
            if holds:
                return verdict, f"{state}; {why}"
        return Verdict.TURN, state


def _able(readings: Sequence[EngineReading], role: Role) -> list[EngineReading]:
    return [reading for reading in readings if reading.role is role and reading.may_turn]


def _key(reading: EngineReading) -> str:
    return reading.key


def _state(busy: Busy, engines: Split) -> str:
    parts = [
        f"{busy.for_role(role):.1f} of {engines.for_role(role)} {role} engines busy"
        for role in Role
    ]
    return " and ".join(parts)
