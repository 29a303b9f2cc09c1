"""Which engines exist, and what is known of each: one record, which dies in one line."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.fleet.compatibility import NO_SLICE, EngineCapabilities, fit, rests
from xpyd_proxy.core.fleet.engine_metrics import ShownLoad
from xpyd_proxy.core.fleet.engine_speed import EngineSpeed
from xpyd_proxy.core.fleet.health import ChangeCount, EngineHealth, HealthState
from xpyd_proxy.core.fleet.load import Load
from xpyd_proxy.core.fleet.lone_prompts import LonePrompts
from xpyd_proxy.core.fleet.pair_health import PairHealth
from xpyd_proxy.core.fleet.target import BY_HAND, EngineSource, Key, Origin, Target
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.errors import AlreadyKnown, NoInstance, UnknownInstance
from xpyd_proxy.settings import Settings, SlicePairing

_SURE: Final = 2  # readings in a row: vLLM's numbers are those of its step before


@dataclass(slots=True)
class Drain:
    """What is seen of an engine while it is drained: its own requests end first, then what decode engines may read."""

    since: float  # when it got its last request, or was told to drain
    kept: float | None = None  # as it said last; None: it does not say
    zeros: int = 0  # readings in a row that said that nothing is kept
    moves: bool = False  # its streams go on at other engines (requests/stream_moves.py)

    def reading(self, kept: float | None) -> None:
        """Take in what it said of the blocks it keeps."""
        self.kept = kept
        self.zeros = self.zeros + 1 if kept == 0 else 0

    def verdict(self, role: Role, in_flight: int, *, patience_s: float, now: float) -> str | None:
        """Say why it is empty; None: it is not.

        A prefill engine that does not say what it keeps, or seems to keep it for ever, is believed to be empty after
        ``patience_s`` seconds without a request: by then its leases have run out.
        """
        if in_flight:
            self.since, self.zeros = now, 0
            return None
        if role is Role.DECODE:
            return "has no request left"
        if self.zeros >= _SURE:
            return "has no request left and keeps nothing for decode engines"
        if now < self.since + patience_s:
            return None
        said = "does not say what it keeps" if self.kept is None else f"still shows {self.kept:g} of what it keeps"
        return f"has had no request for {patience_s:g} s, but {said}"


@dataclass(slots=True)
class Member:
    """One engine, and all that is known of it."""

    instance: Instance
    life: EngineHealth
    load: Load = field(default_factory=Load)
    speed: EngineSpeed = field(default_factory=EngineSpeed)  # filled in for the policies that ask for times
    lone: LonePrompts = field(default_factory=LonePrompts)  # filled in if the decode policy remembers prompts
    facts: EngineCapabilities = field(default_factory=EngineCapabilities)
    drain: Drain | None = None  # while it is drained
    retires: bool = False  # it is forgotten once it is drained
    origin: Origin = BY_HAND  # who wants it here
    shown: ShownLoad | None = None  # decode: how busy it was by its own metrics; None: it does not say


class Registry:
    """The engines, which come and go while requests are served. Times are seconds of a clock that only rises."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._members: dict[InstanceId, Member] = {}
        self.get: Final = self._members.get  # what is known of an engine; None if it was removed meanwhile
        self._at: dict[tuple[Role, str, int], set[InstanceId]] = {}  # the same by role, host and port; none is empty
        self._added: dict[Role, int] = dict.fromkeys(Role, 0)
        self.moving: dict[InstanceId, None] = {}  # drained by moving their streams
        self.changes = ChangeCount()
        self.pairs: Final = PairHealth(self._settings)
        self.slice_pairing: Final = self._settings.slice_pairing

    def add(
        self,
        role: Role,
        address: Address,
        *,
        rank: int | None = None,
        facts: EngineCapabilities | None = None,
        now: float = 0.0,
        origin: Origin = BY_HAND,
    ) -> Instance:
        """Start to route to an engine, or one rank of it, under a new id; raises AlreadyKnown for its role."""
        self._check_new(role, address, rank)
        name = InstanceId(f"{role}-{self._added[role]}")
        self._added[role] += 1
        instance = Instance(name, role, address, rank)
        life = EngineHealth(now, self._settings, changes=self.changes)
        self._members[name] = Member(instance, life, facts=facts or EngineCapabilities(), origin=origin)
        self._at.setdefault(_place(instance), set()).add(name)
        self.changes.count += 1
        return instance

    def add_target(self, role: Role, target: Target, *, now: float, origin: Origin = BY_HAND) -> Sequence[Instance]:
        """Start to route to an engine, or to each of its data-parallel ranks; raises AlreadyKnown."""
        within = (target.slice or NO_SLICE) if self.slice_pairing is SlicePairing.REQUIRE else None
        facts = EngineCapabilities(mode=target.mode, revision=target.revision, slice=target.slice, pairs_within=within)
        return [self.add(role, target.address, rank=rank, facts=facts, now=now, origin=origin) for rank in target.ranks]

    def claim(self, role: Role, authority: str) -> None:
        """Keep what is at an address whatever discovery says of it: the settings name it."""
        for member in self._of(role):
            if member.instance.address.authority == authority and not member.retires:
                member.origin = BY_HAND

    def is_given(self, address: Address) -> bool:
        """Tell whether the settings or a pod name what is at an address; what was added by hand is not given."""
        for role in Role:
            for name in self._at.get((role, address.host, address.port), ()):
                if self._members[name].origin.source is not EngineSource.STORE:
                    return True
        return False

    def remove(self, name: InstanceId, *, now: float) -> None:
        """Forget an engine; its legs go on, and are nobody's. Raises UnknownInstance: there is none of this id."""
        member = self.member(name)
        member.life.remove(now=now)
        self.pairs.forget(name)
        del self._members[name]
        self.moving.pop(name, None)
        place = _place(member.instance)
        self._at[place].discard(name)
        if not self._at[place]:
            del self._at[place]

    def drain(self, name: InstanceId, *, now: float, moves: bool = False) -> None:
        """Send it nothing new; ``moves``: its streams go on at other engines. Raises UnknownInstance."""
        member = self.member(name)
        member.life.drain(now=now)
        drain = member.drain = member.drain or Drain(now)
        if moves and not drain.moves:
            drain.moves = True
            self.moving[name] = None
            if member.life.state is HealthState.DRAINING:
                member.life.why = "is to be drained, and its streams move"

    def retire(self, name: InstanceId, *, now: float) -> None:
        """Send it nothing new, and forget it as soon as it has nothing left; raises UnknownInstance."""
        self.drain(name, now=now)
        self.member(name).retires = True

    def undrain(self, name: InstanceId, *, now: float) -> None:
        """Send it requests again; raises UnknownInstance, or AlreadyKnown: it retires, and another is there."""
        member = self.member(name)
        if member.retires:
            self._check_new(member.instance.role, member.instance.address, member.instance.rank)
        member.life.undrain(now=now)
        member.drain, member.retires = None, False
        self.moving.pop(name, None)

    def settle(self, *, patience_s: float, now: float) -> Sequence[Instance]:
        """Let the engines that are drained now be so, and return them; those that retire are forgotten."""
        drained = list[Instance]()
        for member in self.members():
            one, life = member.instance, member.life
            if life.state is HealthState.DRAINING and member.drain is not None:
                found = member.drain.verdict(one.role, member.load.in_flight, patience_s=patience_s, now=now)
                if found is not None:
                    life.empty(found, now=now)
                    drained.append(one)
            if member.retires and life.state is HealthState.DRAINED:
                self.remove(one.id, now=now)
        return drained

    def member(self, name: InstanceId) -> Member:
        """Return what is known of an engine. Raises UnknownInstance: there is none of this id."""
        if (member := self._members.get(name)) is None:
            raise UnknownInstance(f"there is no instance {name!r}: `xpyd instances list` shows those there are")
        return member

    def members(self) -> Sequence[Member]:
        """List all engines, in the order they were added."""
        return tuple(self._members.values())

    def members_at(self, places: Iterable[Key]) -> Sequence[Member]:
        """List the engines of some places, also those that retire."""
        wanted = [(key, Address.parse(key.authority)) for key in places]
        return [
            self._members[name]
            for key, address in wanted
            for name in sorted(self._at.get((key.role, address.host, address.port), ()))
            if self._members[name].instance.address.authority == key.authority
        ]

    def known(self, role: Role, /) -> Sequence[Instance]:
        """List the engines of a role, also those that must not get a request now, in the order they were added."""
        return tuple(member.instance for member in self._of(role))

    def usable(self, role: Role, /, *, now: float = 0.0) -> Sequence[Instance]:
        """List the engines of a role that can take a request; raises NoInstance, with what has become of them."""
        members = self._of(role)
        if found := tuple(member.instance for member in members if member.life.may_serve(now=now)):
            return found
        if not members:
            raise NoInstance(f"the router knows no {role} instance")
        states = list[str]()
        for member in members:
            state = "being tried" if member.life.state is HealthState.HALF_OPEN else member.life.state.value
            why = f" ({member.life.why})" if member.life.state is HealthState.STARTING else ""
            states.append(f"{member.instance.id} is {state}{why}")
        waits = [wait for member in members if (wait := member.life.serves_in_s(now=now)) is not None]
        raise NoInstance(
            f"no {role} instance can take a request: {', '.join(states)}",
            retry_after_s=max(1, math.ceil(min(waits))) if waits else None,
        )

    @property
    def calm_until(self) -> float:
        """When the passing of time, or a choice, may change which engines serve; infinity: only an event does."""
        calm_until = min([member.life.calm_until for member in self._members.values()], default=math.inf)
        return min(calm_until, self.pairs.next_at)

    def fitting(self, prefill: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """List those decode engines that can read the blocks of a prefill engine; what is not known fits everything."""
        return [instance for instance in decode if self.fits(prefill, instance)]

    def fits(self, prefill: Instance, decode: Instance) -> bool:
        """Tell whether two engines can share a request, as far as it is known, and do not rest as a pair."""
        facts = self.facts(decode)
        return fit(self.facts(prefill), facts) and not rests(prefill.id, facts)

    def facts(self, instance: Instance) -> EngineCapabilities:
        """Return what is known of an engine that decides with whom it can share a request."""
        member = self.get(instance.id)
        return EngineCapabilities() if member is None else member.facts

    def facts_of(self, name: InstanceId) -> EngineCapabilities:
        """Return the same of an engine by its id."""
        member = self.get(name)
        return EngineCapabilities() if member is None else member.facts

    def learn(self, name: InstanceId, found: EngineCapabilities) -> None:
        """Take in facts; what is not known, and what is said of an engine that was removed, changes nothing."""
        if (member := self.get(name)) is not None:
            before, member.facts = member.facts, member.facts.updated(found)
            self.changes.count += member.facts != before

    def settle_rests(self, decode: InstanceId) -> None:
        """Have the facts of a decode engine say which prefill engines it avoids."""
        member, avoided = self.get(decode), self.pairs.avoided(decode)
        if member is not None and (member.facts.resting or frozenset()) != avoided:
            self.learn(decode, EngineCapabilities(resting=avoided))

    def _check_new(self, role: Role, address: Address, rank: int | None) -> None:
        for name in self._at.get((role, address.host, address.port), ()):
            member = self._members[name]
            overlaps = rank is None or member.instance.rank in (None, rank)
            if overlaps and not member.retires:
                raise AlreadyKnown(f"{address.authority} is already known as {name}")

    def _of(self, role: Role) -> list[Member]:
        return [member for member in self._members.values() if member.instance.role is role]


def _place(instance: Instance) -> tuple[Role, str, int]:
    return instance.role, instance.address.host, instance.address.port
