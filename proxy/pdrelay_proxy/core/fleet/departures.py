"""Engines that leave: they are drained, forgotten, or turn to another role
(docs/turning-roles.md).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from pdrelay_proxy.core.fleet.health import SERVING, HealthState
from pdrelay_proxy.core.fleet.member import KV_BOTH, Drain, Member
from pdrelay_proxy.core.fleet.member_table import MemberTable
from pdrelay_proxy.core.fleet.turns import TURN_TIMEOUT_S, RoleTurn, TurnEvent, TurnState
from pdrelay_proxy.core.model import EngineRole, Instance, InstanceId, Role
from pdrelay_proxy.errors import CannotTurn


class Departures:
    """Of all engines. Times are seconds of the registry's clock."""

    __slots__ = ("_has_turned", "_table", "moving", "turns")

    def __init__(self, table: MemberTable, has_turned: Callable[[Member], None]) -> None:
        """``has_turned`` is told of each engine that serves another role from now on."""
        self._table = table
        self._has_turned = has_turned
        self.moving: Final = dict[InstanceId, None]()  # drained by moving their streams
        # that are over, by EngineRole and TurnState; or refused
        self.turns: Final = Counter[tuple[str, ...]]()

    # ---- to drain

    def drain(self, name: InstanceId, *, now: float, moves: bool = False) -> None:
        """Send it nothing new; ``moves``: its streams go on at other engines.

        Raises UnknownInstance.
        """
        member = self._table.member(name)
        drain = _drain(member, now=now)
        drain.by_turn = False
        drain.moves_by_hand = drain.moves_by_hand or moves
        self._move_if_asked(member, drain)
        if member.turn is None:
            _say_drained(member, drain)

    def retire(self, name: InstanceId, *, now: float) -> None:
        """Send it nothing new, and forget it once it has nothing left; raises UnknownInstance."""
        self.drain(name, now=now)
        self._table.member(name).retires = True
        self._table.lineup.count += 1

    def undrain(self, name: InstanceId, *, now: float) -> None:
        """Send it requests again, or as soon as it has turned.

        Raises UnknownInstance, or AlreadyKnown: it retires, and another is there.
        """
        member = self._table.member(name)
        if member.retires:
            self._table.check_new(
                member.instance.pool, member.instance.address, member.instance.rank
            )
        member.retires = False
        self._table.lineup.count += 1
        if member.turn is not None and member.drain is not None:
            member.drain.by_turn = True
            member.drain.moves_by_hand = False
            self._move_if_asked(member, member.drain)
        else:
            self._undrain(member, now=now)

    def settle(self, *, patience_s: float, now: float) -> Sequence[Instance]:
        """Let the engines that are drained now be so, and return them.

        Those that turn serve their new role when they are drained, or when their time is over.
        """
        drained = list[Instance]()
        for member in tuple(self._table.by_id.values()):
            life = member.life
            if life.state is HealthState.DRAINING and member.drain is not None:
                first = member.instance.role  # of one that serves both: it may keep blocks, too
                found = member.drain.verdict(
                    first, member.load.in_flight, patience_s=patience_s, now=now
                )
                if found is not None:
                    life.empty(found, now=now)
                    drained.append(member.instance)
            turn = member.turn
            if turn is not None and not member.retires:
                if life.state is HealthState.DRAINED:
                    self._end_turn(member, TurnEvent.EMPTY, now=now)
                elif now >= turn.until:
                    self._end_turn(member, TurnEvent.TIMEOUT, now=now)
        return drained

    def remove(self, member: Member, *, now: float) -> None:
        """An engine is removed."""
        if member.turn is not None:
            self._end_turn(member, TurnEvent.REMOVE, now=now)
        self.moving.pop(member.instance.id, None)

    def _move_if_asked(self, member: Member, drain: Drain) -> None:
        """Have its streams move for as long as its turn, or an operator, wants that."""
        drain.moves = drain.moves_by_hand or member.leaves_decode
        if drain.moves:
            self.moving[member.instance.id] = None
        else:
            self.moving.pop(member.instance.id, None)

    def _undrain(self, member: Member, *, now: float, why: str = "is in use again") -> None:
        member.life.undrain(now=now, why=why)
        member.drain = None
        self.moving.pop(member.instance.id, None)

    # ---- to turn

    def check_role_change(self, name: InstanceId, to: EngineRole, *, force: bool = False) -> None:
        """Check whether an engine may turn; ``force``: also if no other one serves the role that it
        leaves.

        Raises UnknownInstance, or CannotTurn, which says why.
        """
        member = self._table.member(name)
        if member.heading is to:
            return
        why = self._why_not(member, to) or (
            None if force else self._last_of(member, member.role, to)
        )
        if why is not None:
            self._refuse(to, why)

    def check_begun(self, name: InstanceId, before: EngineRole, to: EngineRole) -> None:
        """Check once more, when it is known what others have begun meanwhile; ``before``: what it
        served when asked.

        Raises UnknownInstance, or CannotTurn: it was the last one of a role that it leaves.
        """
        why = self._last_of(self._table.member(name), before, to)
        if why is not None:
            self._refuse(to, why)

    def can_turn(self, name: InstanceId, to: EngineRole) -> bool:
        """Tell whether an engine may turn, as far as is known, if it is not the last one; raises
        UnknownInstance.
        """
        return self._why_not(self._table.member(name), to) is None

    def change_role(
        self, name: InstanceId, to: EngineRole, *, now: float, at_once: bool = False
    ) -> None:
        """Have an engine serve another role as soon as it has nothing left of the one it leaves.

        A turn to what it serves ends the one that is under way. ``at_once``: nothing of this router
        is there, so that it has not turned for this one: it is not counted. One that cannot turn
        stays what it is. Raises UnknownInstance.
        """
        member = self._table.member(name)
        if member.heading is to or (
            member.role is not to and self._why_not(member, to) is not None
        ):
            return
        if member.turn is not None:
            self._end_turn(member, TurnEvent.CANCEL, now=now)
        before = member.role
        if before is to:
            return
        member.turn = RoleTurn(to, now, now + TURN_TIMEOUT_S)
        if at_once or not member.leaves_by(to):
            self._end_turn(member, TurnEvent.EMPTY, now=now, counts=not at_once)
            return
        is_new = member.drain is None
        drain = _drain(member, now=now)
        drain.by_turn = drain.by_turn or is_new
        self._move_if_asked(member, drain)
        if member.life.state is HealthState.DRAINING:
            member.life.why = (
                f"turns to {to}{', and its streams move' if member.leaves_decode else ''}"
            )

    def _end_turn(
        self, member: Member, event: TurnEvent, *, now: float, counts: bool = True
    ) -> None:
        """A turn is over, in one way or another."""
        turn = member.turn
        member.turn = None
        if turn is None:
            return
        self._table.lineup.count += 1
        state = turn.on(event)
        if counts:
            self.turns[turn.to.value, turn.state.value] += 1
        if state in (TurnState.TURNED, TurnState.LATE):
            self._table.serve(member, turn.to)
            self._has_turned(member)
        if event is not TurnEvent.REMOVE and member.drain is not None:
            if member.drain.by_turn:
                why = (
                    f"serves {turn.to}"
                    if state is not TurnState.CANCELLED
                    else f"has not turned to {turn.to}"
                )
                left = member.load.in_flight if state is TurnState.LATE else 0
                self._undrain(
                    member, now=now, why=f"{why}, beside {left} of before" if left else why
                )
            else:  # it stays drained, as it was asked to be by hand
                self._move_if_asked(member, member.drain)
                _say_drained(member, member.drain)

    def _why_not(self, member: Member, to: EngineRole) -> str | None:
        """Say why an engine cannot serve a role; None: it can, as far as is known."""
        name = member.instance.id
        rank = member.instance.rank
        address = member.instance.address
        if rank is not None:
            return f"{name} is rank {rank} of a data-parallel engine: its ranks share an address, and cannot turn"
        if member.retires:
            return (
                f"{name} is no longer listed, and is forgotten when it is drained: it cannot turn"
            )
        if member.facts.kv_role not in (None, KV_BOTH):
            return f"{name} has kv_role {member.facts.kv_role}: only an engine that was started with kv_both can turn"
        for other in self._table.at(address):
            shared = [role for role in Role if to.serves(role) and other.serves_or_will(role)]
            if other is not member and not other.retires and shared:
                there = f"{other.instance.id}, which is {other.heading}"
                return f"{address.authority} is also {there}: remove one of the two"
        return None

    def _last_of(self, member: Member, before: EngineRole, to: EngineRole) -> str | None:
        """Say which of the roles that one leaves no other serves; None: each has another."""
        for role in Role:
            if to.serves(role) or not before.serves(role):
                continue
            others = [
                other
                for other in self._table.others(member, role)
                if other.heading.serves(role)
                and other.life.state in SERVING
                and not other.life.is_away
            ]
            if not others:
                name = member.instance.id
                return f"{name} is the last {role} engine that serves: turn another one to {role} first, or use force"
        return None

    def _refuse(self, to: EngineRole, why: str) -> NoReturn:
        self.turns[to.value, "refused"] += 1
        raise CannotTurn(why)


def _drain(member: Member, *, now: float) -> Drain:
    member.life.drain(now=now)
    drain = member.drain = member.drain or Drain(now)
    return drain


def _say_drained(member: Member, drain: Drain) -> None:
    if member.life.state is HealthState.DRAINING:
        member.life.why = f"is to be drained{', and its streams move' if drain.moves else ''}"
