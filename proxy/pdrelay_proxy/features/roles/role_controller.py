"""Decides, every few seconds, whether an engine should turn to the other role. Boring on purpose.

One engine at a time, and the next one only when the fleet has settled: after a cool-down, and when
the numbers of all engines are new. All that it must know of earlier turns comes with each snapshot,
so another controller goes on where this one ended, and two of them choose the same engine.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading
from pdrelay_proxy.features.roles.role_split import OTHER, Busy, Split, is_short, lacking, wanted
from pdrelay_proxy.features.roles.work_meter import DecodeWork, PrefillWork, RoleTargets, WorkMeter

HOUR_S: Final = 3600.0
_NAMED: Final = 3  # engines that a sentence names


class Verdict(StrEnum):
    """What becomes of one look."""

    TURN = auto()  # an engine turns, or would in a dry run
    ASSIGN = auto()  # an engine that serves both roles turns to one of them, or would
    BALANCED = auto()  # neither role lacks an engine
    # a role lacks an engine, and the other one cannot spare one: the fleet is too small
    SHORT = auto()
    UNKNOWN = auto()  # something was not measured yet
    WAITING = auto()  # a role lacks an engine, but not for long enough
    COOLING = auto()  # the last turn is not long ago
    TURNING = auto()  # an engine turns now
    SPENT = auto()  # there were as many turns in the last hour as there may be
    BOUND = auto()  # the other role has no more engines than it must keep
    STUCK = auto()  # no engine of the other role can turn
    ELSEWHERE = auto()  # another router decides


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """What the controller must keep to."""

    min_prefill: int = 1
    min_decode: int = 1
    cooldown_s: float = 60.0  # between two turns
    turns_per_hour: int = 6
    hold_s: float = 20.0  # for which a role must lack an engine
    release_s: float = 300.0  # for which a role must need fewer engines, before fewer are wanted

    @property
    def least(self) -> Split:
        """Return the engines that each role keeps."""
        return Split(self.min_prefill, self.min_decode)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The engines that serve, and what is known of earlier turns."""

    readings: Sequence[EngineReading]  # without those that turn, and those that serve both roles
    turning: Sequence[InstanceId] = ()
    # when engines began to turn, by any controller; None: by this one alone
    turned_at: Sequence[float] | None = None
    queued_requests: int = 0  # in this router
    trouble: str = ""  # why there can be no decision
    leads: bool = True  # this router decides; others measure, to go on at once
    leader: str = ""  # who does, if it is another one
    both: Sequence[EngineReading] = ()  # those that serve both, whatever role they show


@dataclass(frozen=True, slots=True)
class WantedTurn:
    """One engine, and the role it turns to."""

    instance: InstanceId
    role: Role


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """What was decided, and by which numbers."""

    verdict: Verdict
    why: str  # one sentence
    engines: Split
    prefill: PrefillWork | None  # None: not known
    decode: DecodeWork | None
    wanted: Split | None  # None: not known
    turns: int  # in the last hour, this one included
    lacks: Role | None = None  # the role that should get an engine
    turn: WantedTurn | None = None


class RoleController:
    """Looks at snapshots one after the other. Times are seconds of a clock that only rises."""

    def __init__(self, targets: RoleTargets, limits: RoleLimits) -> None:
        self._targets = targets
        self._limits = limits
        self._meter = WorkMeter(targets)
        self._lacks: tuple[Role, float] | None = None  # which role lacks an engine, and since when
        self._needs = deque[tuple[float, Split]]()  # what was needed lately, the oldest first
        self._own: tuple[float, ...] = ()  # turns that this one has decided

    def decide(self, fleet: FleetSnapshot, *, now: float) -> RoleDecision:
        """Take in a snapshot and decide."""
        self._meter.look(fleet.readings)
        engines = _engines(fleet)
        prefill = self._meter.prefill(fleet.queued_requests)
        decode = self._meter.decode(prefill)
        turned_at = self._turns(fleet.turned_at, now)
        if fleet.both and not fleet.trouble:
            verdict, why, turn = self._assignment(fleet, engines, prefill, decode)
            self._lacks = None
            kept = self._kept(now)
            lacks = None if turn is None else turn.role
            return RoleDecision(
                verdict, why, engines, prefill, decode, kept, len(turned_at), lacks, turn
            )
        trouble = fleet.trouble or self._trouble(fleet, engines, prefill, decode, now)
        if trouble or prefill is None or decode is None:
            self._lacks = None
            return RoleDecision(
                Verdict.UNKNOWN, trouble, engines, prefill, decode, self._kept(now), len(turned_at)
            )
        busy = Busy(prefill.busy, decode.busy, self._targets.utilisation)
        self._needs.append((now, wanted(busy, self._limits.least)))
        lacks = lacking(busy, engines)
        verdict, why = self._verdict(fleet, busy, lacks, turned_at, now=now)
        turn = None
        if verdict is Verdict.TURN and lacks is not None:
            turn = WantedTurn(_first(fleet.readings, OTHER[lacks]).name, lacks)
            why = f"{turn.instance} to {lacks}: {why}"
            turned_at = (*turned_at, now)
            self._lacks = None
            self._own = turned_at
        return RoleDecision(
            verdict, why, engines, prefill, decode, self._kept(now), len(turned_at), lacks, turn
        )

    def _assignment(
        self,
        fleet: FleetSnapshot,
        engines: Split,
        prefill: PrefillWork | None,
        decode: DecodeWork | None,
    ) -> tuple[Verdict, str, WantedTurn | None]:
        """Give an engine that serves both roles the one that needs it more.

        It is no turn of the hour's.

        It already serves that role, so nothing waits for it; what it has of the other one is what a
        turn costs.
        """
        if busy := self._idle_verdict(fleet):
            return *busy, None
        able = [one for one in fleet.both if one.may_turn]
        count = f"{len(fleet.both)} engines serve both roles"
        if not able:
            return Verdict.STUCK, f"{count}, and none of them can turn ({fleet.both[0].name})", None
        least = self._limits.least
        others = len(fleet.both) - 1
        # without it, who serves the other one?
        roles = [role for role in Role if engines.of(OTHER[role]) + others]
        if not roles:
            return Verdict.BOUND, f"{able[0].name} serves both roles, and is the only engine", None
        work = (
            None
            if prefill is None or decode is None
            else Busy(prefill.busy, decode.busy, self._targets.utilisation)
        )

        def need(role: Role) -> tuple[float, float, int, bool]:
            missing = max(0, least.of(role) - engines.of(role))
            return (
                missing,
                work.pressure(role, engines) if work else 0.0,
                -engines.of(role),
                role is Role.DECODE,
            )

        role = max(roles, key=need)
        first = min(able, key=lambda one: one.key)
        state = f"{engines.prefill} engines are prefill and {engines.decode} are decode"
        return (
            Verdict.ASSIGN,
            f"{first.name} to {role}: {count}, {state}",
            WantedTurn(first.name, role),
        )

    def _idle_verdict(self, fleet: FleetSnapshot) -> tuple[Verdict, str] | None:
        """Say why this controller has nothing to decide now; None: it may decide."""
        if not fleet.leads:
            return Verdict.ELSEWHERE, f"{fleet.leader or 'another router'} decides"
        if fleet.turning:
            return Verdict.TURNING, f"{', '.join(fleet.turning[:_NAMED])} turns"
        return None

    def _turns(self, shared: Sequence[float] | None, now: float) -> tuple[float, ...]:
        """Return the turns of the last hour."""
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
        """Say what is not known; empty: nothing that matters."""
        for role in Role:
            if not engines.of(role):
                return f"no {role} engine serves"
        if unknown := self._meter.unknown(fleet.readings, now):
            names = ", ".join(unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
            return f"{len(unknown)} engines are new in their role or do not show vLLM's metrics: {names}"
        for role, work in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            if work is None:
                return f"{role} engines have had too little to do to show their rate"
        return ""

    def _kept(self, now: float) -> Split | None:
        """Return what was needed at most in a while, up to now; None: nothing was known for so
        long.
        """
        while self._needs and self._needs[0][0] < now - self._limits.release_s:
            self._needs.popleft()
        if not self._needs:
            return None
        return Split(*(max([need.of(role) for _, need in self._needs]) for role in Role))

    def _verdict(
        self,
        fleet: FleetSnapshot,
        busy: Busy,
        lacks: Role | None,
        turned_at: Sequence[float],
        *,
        now: float,
    ) -> tuple[Verdict, str]:
        engines = _engines(fleet)
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
                engines.of(giver) <= limits.least.of(giver),
                f"{giver} keeps {limits.least.of(giver)}",
            ),
            (
                Verdict.WAITING,
                now - since < limits.hold_s,
                f"since {now - since:.0f} of {limits.hold_s:g} s",
            ),
            (
                Verdict.SPENT,
                len(turned_at) >= limits.turns_per_hour,
                f"{len(turned_at)} engines have turned in the last hour",
            ),
            (
                Verdict.COOLING,
                bool(turned_at) and now - max(turned_at) < limits.cooldown_s,
                f"the last turn was less than {limits.cooldown_s:g} s ago",
            ),
            (Verdict.STUCK, not _able(fleet.readings, giver), f"no {giver} engine can turn"),
        )
        for verdict, holds, why in checks:
            if holds:
                return verdict, f"{state}; {why}"
        return Verdict.TURN, state


def _engines(fleet: FleetSnapshot) -> Split:
    return Split(*(sum([one.role is role for one in fleet.readings]) for role in Role))


def _able(readings: Sequence[EngineReading], role: Role) -> list[EngineReading]:
    return [one for one in readings if one.role is role and one.may_turn]


def _first(readings: Sequence[EngineReading], role: Role) -> EngineReading:
    """Return the engine that turns: the same one for all controllers, whatever they see of
    loads.
    """
    return min(_able(readings, role), key=lambda one: one.key)


def _state(busy: Busy, engines: Split) -> str:
    parts = [f"{busy.of(role):.1f} of {engines.of(role)} {role} engines busy" for role in Role]
    return " and ".join(parts)
