"""Which engines exist, and what is known of each: one record, which dies in one line."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NoReturn, TypeAlias

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import NO_SLICE, EngineCapabilities, fit, rests
from pdrelay_proxy.core.fleet.engine_speed import EngineSpeed
from pdrelay_proxy.core.fleet.health import SERVING, ChangeCount, EngineHealth, HealthState
from pdrelay_proxy.core.fleet.kv_relief import KvRelief
from pdrelay_proxy.core.fleet.load import Load
from pdrelay_proxy.core.fleet.lone_prompts import LonePrompts
from pdrelay_proxy.core.fleet.pair_health import Pair, PairHealth
from pdrelay_proxy.core.fleet.target import BY_HAND, EngineSource, Key, Origin, Target
from pdrelay_proxy.core.fleet.turns import TURN_TIMEOUT_S, RoleTurn, TurnEvent, TurnState
from pdrelay_proxy.core.model import EngineRole, Instance, InstanceId, Role
from pdrelay_proxy.errors import AlreadyKnown, BadRequest, CannotTurn, NoInstance, UnknownInstance
from pdrelay_proxy.settings import Settings, SlicePairing

_KV_BOTH: Final = "kv_both"  # vLLM's kv_role of an engine that sends and loads KV
_HEALTHY: Final = HealthState.HEALTHY  # looking a member up takes as long as a call
_LEAVING: Final = frozenset({HealthState.DRAINING, HealthState.DRAINED})
_WELL: Final = frozenset({HealthState.STARTING, HealthState.HEALTHY})
_STAYING: Final = SERVING | {HealthState.EJECTED}  # those that are not on their way out
MOST_NAMED: Final = 16  # engines in one message
_NAME_MOST: Final = 100  # characters of one model's name in a message
_MOST_MODELS: Final = 10  # names in one message: an engine may have thousands of adapters
_MOST_SHARED: Final = 1024  # sets of models; beyond, those that no engine serves any more are forgotten
_SURE: Final = 2  # readings in a row: vLLM's numbers are those of its step before

# The engine id, when the process started, the rank and the role that an engine was added with.
_TwinKey: TypeAlias = tuple[str, str | None, int | None, Role]


@dataclass(slots=True)
class Drain:
    """What is seen of an engine while it is drained: its own requests end first, then what decode engines may read."""

    since: float  # when it got its last request, or was told to drain
    kept: float | None = None  # as it said last; None: it does not say
    zeros: int = 0  # readings in a row that said that nothing is kept
    moves: bool = False  # its streams go on at other engines (requests/stream_moves.py)
    moves_by_hand: bool = False  # they shall also when no turn asks for it
    by_turn: bool = False  # for a turn alone: nobody wants it drained when that is over

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

    instance: Instance  # of one that serves both roles: as a prefill engine
    life: EngineHealth
    load: Load = field(default_factory=Load)
    speed: EngineSpeed = field(default_factory=EngineSpeed)  # filled in for the policies that ask for times
    lone: LonePrompts = field(default_factory=LonePrompts)  # filled in if the decode policy remembers prompts
    facts: EngineCapabilities = field(default_factory=EngineCapabilities)
    drain: Drain | None = None  # while it is drained
    retires: bool = False  # it is forgotten once it is drained
    origin: Origin = BY_HAND  # who wants it here
    as_decode: Instance | None = None  # of one that serves both roles; None: it serves that of ``instance``
    turn: RoleTurn | None = None  # while it turns

    @property
    def role(self) -> EngineRole:
        """What it serves, also while it turns to something else."""
        if self.as_decode is not None:
            return EngineRole.BOTH
        return EngineRole.PREFILL if self.instance.role is Role.PREFILL else EngineRole.DECODE

    @property
    def heading(self) -> EngineRole:
        """What it serves, or turns to."""
        return self.role if self.turn is None else self.turn.to

    @property
    def leaves_decode(self) -> bool:
        """Tell whether it turns away from decode."""
        return self.turn is not None and Role.DECODE in self.leaves_by(self.turn.to)

    def leaves_by(self, to: EngineRole) -> Sequence[Role]:
        """List the roles that it serves, and would not any more."""
        return [role for role in Role if self.role.serves(role) and not to.serves(role)]

    def serves_or_will(self, role: Role) -> bool:
        """Tell whether it serves a role, or turns to it."""
        return self.role.serves(role) or self.heading.serves(role)

    def as_role(self, role: Role) -> Instance | None:
        """Return the engine as it serves a role; None: it does not."""
        return self.instance if self.instance.role is role else self.as_decode

    def as_lender(self) -> Instance | None:
        """Return the engine as the prefill engine of what it has in its prefix cache; None: it is not asked for that.

        It does not hand KV over (``kv_consumer``), does not answer its probes, or is several ranks behind one address,
        of which another one would get the request.
        """
        facts = self.facts
        hides_ranks = facts.connector is not None and facts.engine_id is None and self.instance.rank is None
        if facts.kv_role not in (None, _KV_BOTH) or self.life.misses or self.life.is_away or hides_ranks:
            return None
        return self._as(Role.PREFILL)

    def as_stream_source(self) -> Instance:
        """Return the engine as the decode engine of a stream that it has, or had: it may have turned since."""
        return self._as(Role.DECODE)

    def serve(self, role: EngineRole) -> None:
        """Serve this and nothing else."""
        self.as_decode = self._as(Role.DECODE) if role is EngineRole.BOTH else None
        self.instance = self._as(Role.DECODE if role is EngineRole.DECODE else Role.PREFILL)

    def _as(self, role: Role) -> Instance:
        one = self.instance
        return Instance(one.id, role, one.address, one.rank, None if role is one.pool else one.pool)


@dataclass(frozen=True, slots=True)
class _Usable:
    """The engines of a role that can take a request, while nothing changes."""

    version: int  # the changes counted so far
    until: float  # when the passing of time may change it
    engines: Sequence[Instance]


class Registry:
    """The engines, which come and go while requests are served. Times are seconds of a clock that only rises."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._members: dict[InstanceId, Member] = {}
        # Those that serve a role, as they do: in the order of the members.
        self._serving: dict[Role, dict[InstanceId, tuple[EngineHealth, Instance]]] = {role: {} for role in Role}
        self.get: Final = self._members.get  # what is known of an engine; None if it was removed meanwhile
        # The same by the role they were added with, host and port; none is empty.
        self._at: dict[tuple[Role, str, int], set[InstanceId]] = {}
        self._added: dict[Role, int] = dict.fromkeys(Role, 0)
        self.moving: dict[InstanceId, None] = {}  # drained by moving their streams
        self.relief: Final = KvRelief(self._settings.move_above)
        self.turns: Final = Counter[tuple[str, ...]]()  # that are over, by EngineRole and TurnState; or refused
        self.changes = ChangeCount()
        self.lineup = ChangeCount()  # of what decides which engines there should be: not of their health
        self._usable: dict[Role, _Usable] = {}
        self._twin_keys = Counter[_TwinKey]()
        self._twins: set[_TwinKey] = set()  # those of them that several members have
        self._steady: tuple[int, float] = (-1, 0.0)  # until when nothing but events changes it, and for which changes
        # Sets of models that engines serve, or of their base models, so that equal ones are the same: thousands are
        # then compared in no time.
        self._models: dict[frozenset[str], frozenset[str]] = {}
        self._served: tuple[int, frozenset[str]] = (-1, frozenset())  # the names in them, and for which changes
        self._bases: tuple[int, frozenset[frozenset[str]]] = (-1, frozenset())  # of engines that serve, likewise
        self.pairs: Final = PairHealth()
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
        life = EngineHealth(now, self._settings, changes=self.changes, is_needed=partial(self._is_needed, name))
        self._members[name] = Member(instance, life, facts=self._shared(facts or EngineCapabilities()), origin=origin)
        self._recount_twins(None, self._twin_key(self._members[name]))
        self._serving[role][name] = life, instance
        self._at.setdefault(_place(instance), set()).add(name)
        self.changes.count += 1
        self.lineup.count += 1
        return instance

    def add_target(self, role: Role, target: Target, *, now: float, origin: Origin = BY_HAND) -> Sequence[Instance]:
        """Start to route to an engine, or to each of its data-parallel ranks; raises AlreadyKnown."""
        within = (target.slice or NO_SLICE) if self.slice_pairing is SlicePairing.REQUIRE else None
        facts = EngineCapabilities(mode=target.mode, revision=target.revision, slice=target.slice, pairs_within=within)
        return [self.add(role, target.address, rank=rank, facts=facts, now=now, origin=origin) for rank in target.ranks]

    def claim(self, role: Role, authority: str) -> None:
        """Keep what is at an address whatever discovery says of it: the settings name it."""
        for member in self.members_at([Key(role, authority)]):
            if not member.retires:
                member.origin = BY_HAND
                self.lineup.count += 1

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
        if member.turn is not None:
            self._end_turn(member, TurnEvent.REMOVE, now=now)
        member.life.remove(now=now)
        self.pairs.forget(name)
        self.lineup.count += 1
        del self._members[name]
        for serving in self._serving.values():
            serving.pop(name, None)
        self.moving.pop(name, None)
        place = _place(member.instance)
        self._at[place].discard(name)
        if not self._at[place]:
            del self._at[place]
        self._recount_twins(self._twin_key(member), None)

    def drain(self, name: InstanceId, *, now: float, moves: bool = False) -> None:
        """Send it nothing new; ``moves``: its streams go on at other engines. Raises UnknownInstance."""
        member = self.member(name)
        drain = self._drain(member, now=now)
        drain.by_turn = False
        drain.moves_by_hand = drain.moves_by_hand or moves
        self._move_if_asked(member, drain)
        if member.turn is None:
            _say_drained(member, drain)

    def retire(self, name: InstanceId, *, now: float) -> None:
        """Send it nothing new, and forget it as soon as it has nothing left; raises UnknownInstance."""
        self.drain(name, now=now)
        self.member(name).retires = True
        self.lineup.count += 1

    def undrain(self, name: InstanceId, *, now: float) -> None:
        """Send it requests again, or as soon as it has turned.

        Raises UnknownInstance, or AlreadyKnown: it retires, and another is there.
        """
        member = self.member(name)
        if member.retires:
            self._check_new(member.instance.pool, member.instance.address, member.instance.rank)
        member.retires = False
        self.lineup.count += 1
        if member.turn is not None and member.drain is not None:
            member.drain.by_turn, member.drain.moves_by_hand = True, False
            self._move_if_asked(member, member.drain)
        else:
            self._undrain(member, now=now)

    def check_turn(self, name: InstanceId, to: EngineRole, *, force: bool = False) -> None:
        """Check whether an engine may turn; ``force``: also if no other one serves the role that it leaves.

        Raises UnknownInstance, or CannotTurn, which says why.
        """
        member = self.member(name)
        if member.heading is to:
            return
        why = self._why_not(member, to) or (None if force else self._last_of(member, member.role, to))
        if why is not None:
            self._refuse(to, why)

    def check_begun(self, name: InstanceId, before: EngineRole, to: EngineRole) -> None:
        """Check once more, when it is known what others have begun meanwhile; ``before``: what it served when asked.

        Raises UnknownInstance, or CannotTurn: it was the last one of a role that it leaves.
        """
        why = self._last_of(self.member(name), before, to)
        if why is not None:
            self._refuse(to, why)

    def can_turn(self, name: InstanceId, to: EngineRole) -> bool:
        """Tell whether an engine may turn, as far as is known, if it is not the last one; raises UnknownInstance."""
        return self._why_not(self.member(name), to) is None

    def turn(self, name: InstanceId, to: EngineRole, *, now: float, at_once: bool = False) -> None:
        """Have an engine serve another role as soon as it has nothing left of the one it leaves.

        A turn to what it serves ends the one that is under way. ``at_once``: nothing of this router is there, so that
        it has not turned for this one: it is not counted. One that cannot turn stays what it is. Raises
        UnknownInstance.
        """
        member = self.member(name)
        if member.heading is to or (member.role is not to and self._why_not(member, to) is not None):
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
        drain = self._drain(member, now=now)
        drain.by_turn = drain.by_turn or is_new
        self._move_if_asked(member, drain)
        if member.life.state is HealthState.DRAINING:
            member.life.why = f"turns to {to}{', and its streams move' if member.leaves_decode else ''}"

    def settle(self, *, patience_s: float, now: float) -> Sequence[Instance]:
        """Let the engines that are drained now be so, and return them; those that retire are forgotten.

        Those that turn serve their new role when they are drained, or when their time is over.
        """
        drained = list[Instance]()
        for member in self.members():
            one, life = member.instance, member.life
            if life.state is HealthState.DRAINING and member.drain is not None:
                first = member.instance.role  # of one that serves both: it may keep blocks, too
                found = member.drain.verdict(first, member.load.in_flight, patience_s=patience_s, now=now)
                if found is not None:
                    life.empty(found, now=now)
                    drained.append(one)
            turn = member.turn
            if turn is not None and not member.retires:
                if life.state is HealthState.DRAINED:
                    self._end_turn(member, TurnEvent.EMPTY, now=now)
                elif now >= turn.until:
                    self._end_turn(member, TurnEvent.TIMEOUT, now=now)
            if member.retires and life.state is HealthState.DRAINED:
                self.remove(one.id, now=now)
        return drained

    def member(self, name: InstanceId) -> Member:
        """Return what is known of an engine. Raises UnknownInstance: there is none of this id."""
        if (member := self._members.get(name)) is None:
            raise UnknownInstance(f"there is no instance {name!r}: `pdrelay instances list` shows those there are")
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
        return tuple([instance for _, instance in self._serving[role].values()])

    def usable(self, role: Role, /, *, now: float = 0.0) -> Sequence[Instance]:
        """List the engines of a role that can take a request; raises NoInstance, with what has become of them.

        While nothing changes, the list is the same one: a request must not cost a look at each of thousands.
        """
        known = self._usable.get(role)
        if known is not None and known.version == self.changes.count and now < known.until:
            return known.engines
        found, until = list[Instance](), math.inf
        for life, instance in self._serving[role].values():
            if life.state is _HEALTHY:  # nearly all are
                found.append(instance)
                continue
            if life.may_serve(now=now):
                found.append(instance)
            until = min(until, life.steady_until)
        if found:
            found = self._without_twins(found)
            usable = self._usable[role] = _Usable(self.changes.count, until, tuple(found))
            return usable.engines
        raise self._none_usable(role, now)

    def twin_of(self, name: InstanceId) -> InstanceId | None:
        """Return the engine that gets the requests of another one that is the same under another address; None: none.

        It is the first one of those that take requests: an engine may have moved to another address.
        """
        member = self.get(name) if self._twins else None
        if member is None or self._twin_key(member) not in self._twins:
            return None
        for role in Role:
            one = member.as_role(role)
            engines = [other for life, other in self._serving[role].values() if life.state in SERVING]
            if one is not None and one in engines:
                kept = self._without_twins([other for other in engines if self._is_same_engine(one, other)])
                if kept and kept[0].id != name:
                    return kept[0].id
        return None

    def _without_twins(self, engines: list[Instance]) -> list[Instance]:
        """Leave one of those that are one engine under several addresses: it would get as many shares."""
        if not self._twins:
            return engines
        kept, seen = list[Instance](), set[_TwinKey]()
        for instance in engines:
            key = self._twin_key(self._members[instance.id])
            if key is None or key not in seen:
                kept.append(instance)
            if key is not None:
                seen.add(key)
        return kept

    def _is_same_engine(self, one: Instance, other: Instance) -> bool:
        return self._twin_key(self._members[one.id]) == self._twin_key(self._members[other.id])

    def _twin_key(self, member: Member) -> _TwinKey | None:
        """Return what two records of one engine have in common, if it is known.

        Ranks behind one address have one engine id. Two processes may have been given one by mistake, and are two.
        """
        facts, one = member.facts, member.instance
        return None if facts.engine_id is None else (facts.engine_id, facts.started, one.rank, one.pool)

    def _recount_twins(self, before: _TwinKey | None, now: _TwinKey | None) -> None:
        """A member has another key, or is new, or gone."""
        if before == now:
            return
        for key, change in ((before, -1), (now, 1)):
            if key is not None:
                self._twin_keys[key] += change
                if self._twin_keys[key] > 1:
                    self._twins.add(key)
                else:
                    self._twins.discard(key)
                if not self._twin_keys[key]:
                    del self._twin_keys[key]

    def _is_needed(self, name: InstanceId) -> bool:
        """Tell whether an engine is the last one of a role, or more than half of that role would be away without it."""
        member = self._members.get(name)
        if member is None:
            return False
        for role in Role:
            if not member.role.serves(role):
                continue
            others = [other for other in self._others(member, role) if other.life.state in _STAYING]
            there = [other for other in others if other.life.state in _WELL and not other.life.is_away]
            if not there or 2 * (len(others) - len(there) + 1) > len(others) + 1:
                return True
        return False

    def _others(self, member: Member, role: Role) -> Sequence[Member]:
        """Return the other engines of a role; those that serve none of an engine's models are no others."""
        own = member.facts.models
        return [
            other
            for other in self._members.values()
            if other is not member
            and other.role.serves(role)
            and (own is None or other.facts.models is None or own & other.facts.models)
        ]

    def _none_usable(self, role: Role, now: float) -> NoInstance:
        members = [self._members[name] for name in self._serving[role]]
        if not members:
            return NoInstance(f"the router knows no {role} instance")
        states = list[str]()
        for member in members:
            state = "being tried" if member.life.state is HealthState.HALF_OPEN else member.life.state.value
            why = f" ({member.life.why})" if member.life.state is HealthState.STARTING else ""
            states.append(f"{member.instance.id} is {state}{why}")
        waits = [wait for member in members if (wait := member.life.serves_in_s(now=now)) is not None]
        return NoInstance(
            f"no {role} instance can take a request: {listed(states)}",
            retry_after_s=max(1, math.ceil(min(waits))) if waits else None,
        )

    @property
    def steady_until(self) -> float:
        """When the passing of time may change which engines are usable; infinity: only what is counted does."""
        version, until = self._steady
        if version != self.changes.count:
            known = [each.until for each in self._usable.values() if each.version == self.changes.count]
            if len(known) == len(Role):  # all engines were looked at just now
                until = min(known)
            else:
                lives = [member.life for member in self._members.values() if member.life.state is not _HEALTHY]
                until = min([life.steady_until for life in lives], default=math.inf)
            self._steady = self.changes.count, until
        return until

    @property
    def served(self) -> frozenset[str]:
        """The models that engines say they serve."""
        version, names = self._served
        if version != self.changes.count:
            known = {member.facts.models for member in self._members.values() if member.facts.models is not None}
            names = frozenset[str]().union(*known)
            self._served = self.changes.count, names
        return names

    def model_of_unnamed(self) -> str | None:
        """Return the model that a request means which names none: the one base model of all engines that serve.

        None: no engine has said what it serves. An adapter does not count: its engine serves its base model, too.
        Raises BadRequest: there are several.
        """
        version, bases = self._bases
        if version != self.changes.count:
            lives = [member for member in self._members.values() if member.life.state not in _LEAVING]
            bases = frozenset([member.facts.bases for member in lives if member.facts.bases is not None])
            self._bases = self.changes.count, bases
        if not bases:
            return None
        first, *others = bases
        common = first.intersection(*others)
        if not common:
            raise BadRequest(
                f"name a model: the engines behind this router serve {first_of(frozenset[str]().union(*bases))}",
                param="model",
            )
        return min(common)

    def named_models(self) -> str:
        """Name the models that engines say they serve, base models first."""
        adapters = [member.facts.adapters for member in self._members.values() if member.facts.adapters]
        return first_of(self.served, frozenset[str]().union(*adapters))

    def fitting(self, prefill: Instance, decode: Sequence[Instance], /) -> Sequence[Instance]:
        """List those decode engines that can read the blocks of a prefill engine; what is not known fits everything."""
        return [instance for instance in decode if self.fits(prefill, instance)]

    def fits(self, prefill: Instance, decode: Instance) -> bool:
        """Tell whether two engines can share a request, as far as it is known, and do not rest as a pair.

        One that serves both roles shares none with itself: there would be nothing to transfer.
        """
        facts = self.facts(decode)
        return prefill.id != decode.id and fit(self.facts(prefill), facts) and not rests(prefill.id, facts)

    def facts(self, instance: Instance) -> EngineCapabilities:
        """Return what is known of an engine that decides with whom it can share a request."""
        member = self.get(instance.id)
        return EngineCapabilities() if member is None else member.facts

    def facts_of(self, name: InstanceId) -> EngineCapabilities:
        """Return the same of an engine by its id."""
        member = self.get(name)
        return EngineCapabilities() if member is None else member.facts

    def link(self, pair: Pair) -> tuple[str | bool | None, ...]:
        """Name the kind of the link between two engines: pairs of one kind differ in nothing that is known."""
        members = [member for name in pair if (member := self.get(name)) is not None]
        hosts = {member.instance.address.host for member in members}
        facts = [fact for one in members for fact in (one.facts.mode, one.facts.revision, one.facts.slice)]
        return (*facts, len(hosts) < len(members))

    def learn(self, name: InstanceId, found: EngineCapabilities) -> None:
        """Take in facts; what is not known, and what is said of an engine that was removed, changes nothing."""
        if (member := self.get(name)) is not None:
            facts = self._shared(member.facts.updated(found))
            if facts != member.facts:
                self.lineup.count += facts.kv_role != member.facts.kv_role  # it may turn now
                before = self._twin_key(member)
                member.facts = facts
                self.changes.count += 1
                self._recount_twins(before, self._twin_key(member))

    def settle_rests(self, decode: InstanceId) -> None:
        """Have the facts of a decode engine say which prefill engines it avoids."""
        member, avoided = self.get(decode), self.pairs.avoided(decode)
        if member is not None and (member.facts.resting or frozenset()) != avoided:
            self.learn(decode, EngineCapabilities(resting=avoided))

    def _shared(self, facts: EngineCapabilities) -> EngineCapabilities:
        """Return facts with what follows from them; they name the sets of models that other engines name, too."""
        facts = facts.in_one_line()
        root = facts.root if facts.fingerprint is None else None  # that of our connector tells models apart better
        if facts.models is None:
            return facts if root is facts.root else replace(facts, root=root)
        models = self._same(facts.models)
        bases = models if not facts.adapters else self._same(models - facts.adapters)
        if models is facts.models and bases is facts.bases and root is facts.root:
            return facts
        return replace(facts, models=models, bases=bases, root=root)

    def _same(self, names: frozenset[str]) -> frozenset[str]:
        """Return the set of these names that other engines have."""
        found = self._models.get(names)
        if found is None:
            if len(self._models) >= _MOST_SHARED:
                all_facts = [member.facts for member in self._members.values()]
                known = [each for facts in all_facts for each in (facts.models, facts.bases)]
                self._models = {each: each for each in known if each is not None}
            found = self._models.setdefault(names, names)
        return found

    def _drain(self, member: Member, *, now: float) -> Drain:
        member.life.drain(now=now)
        drain = member.drain = member.drain or Drain(now)
        return drain

    def _move_if_asked(self, member: Member, drain: Drain) -> None:
        """Have its streams move as long as its turn, or whoever has drained it by hand, wants that."""
        drain.moves = drain.moves_by_hand or member.leaves_decode
        if drain.moves:
            self.moving[member.instance.id] = None
        else:
            self.moving.pop(member.instance.id, None)

    def _undrain(self, member: Member, *, now: float, why: str = "is in use again") -> None:
        member.life.undrain(now=now, why=why)
        member.drain = None
        self.moving.pop(member.instance.id, None)

    def _why_not(self, member: Member, to: EngineRole) -> str | None:
        """Say why an engine cannot serve a role; None: it can, as far as is known."""
        one = member.instance
        if one.rank is not None:
            return f"{one.id} is rank {one.rank} of a data-parallel engine: its ranks share an address, and cannot turn"
        if member.retires:
            return f"{one.id} is no longer listed, and is forgotten when it is drained: it cannot turn"
        if member.facts.kv_role not in (None, _KV_BOTH):
            return f"{one.id} has kv_role {member.facts.kv_role}: only an engine that was started with kv_both can turn"
        for role in Role:
            for name in self._at.get((role, one.address.host, one.address.port), ()):
                other = self._members[name]
                shared = [each for each in Role if to.serves(each) and other.serves_or_will(each)]
                if other is not member and not other.retires and shared:
                    return f"{one.address.authority} is also {name}, which is {other.heading}: remove one of the two"
        return None

    def _refuse(self, to: EngineRole, why: str) -> NoReturn:
        self.turns[to.value, "refused"] += 1
        raise CannotTurn(why)

    def _last_of(self, member: Member, before: EngineRole, to: EngineRole) -> str | None:
        """Say which role no other engine serves of those that one leaves; None: each has another."""
        for role in Role:
            if to.serves(role) or not before.serves(role):
                continue
            others = [
                other
                for other in self._others(member, role)
                if other.heading.serves(role) and other.life.state in SERVING and not other.life.is_away
            ]
            if not others:
                name = member.instance.id
                return f"{name} is the last {role} engine that serves: turn another one to {role} first, or use force"
        return None

    def _end_turn(self, member: Member, event: TurnEvent, *, now: float, counts: bool = True) -> None:
        """A turn is over, in one way or another."""
        turn, member.turn = member.turn, None
        if turn is None:
            return
        self.lineup.count += 1
        state = turn.on(event)
        if counts:
            self.turns[turn.to.value, turn.state.value] += 1
        if state in (TurnState.TURNED, TurnState.LATE):
            self._serve(member, turn.to)
        if event is not TurnEvent.REMOVE and member.drain is not None:
            if member.drain.by_turn:
                why = f"serves {turn.to}" if state is not TurnState.CANCELLED else f"has not turned to {turn.to}"
                left = member.load.in_flight if state is TurnState.LATE else 0
                self._undrain(member, now=now, why=f"{why}, beside {left} of before" if left else why)
            else:  # it stays drained, as it was asked to be by hand
                self._move_if_asked(member, member.drain)
                _say_drained(member, member.drain)

    def _serve(self, member: Member, role: EngineRole) -> None:
        """Have an engine serve a role, and forget what was true of it in the role that it leaves.

        Its prefix cache is what it was, and so is what is known of it: the process is the same.
        """
        name = member.instance.id
        member.serve(role)
        for each in Role:  # it is as old as it was, in whatever it serves
            found = [(one, one.as_role(each)) for one in self._members.values()]
            self._serving[each] = {one.id: (other.life, one) for other, one in found if one is not None}
        member.speed = EngineSpeed()
        member.lone = LonePrompts()
        member.load.report = None
        for _, decode in (*self.pairs.forget(name), (name, name)):
            self.settle_rests(decode)
        self.changes.count += 1

    def _check_new(self, role: Role, address: Address, rank: int | None) -> None:
        for declared in Role:
            for name in self._at.get((declared, address.host, address.port), ()):
                member = self._members[name]
                overlaps = rank is None or member.instance.rank in (None, rank)
                if overlaps and not member.retires and (declared is role or member.serves_or_will(role)):
                    raise AlreadyKnown(f"{address.authority} is already known as {name}")


def listed(names: Sequence[str]) -> str:
    """Name the first of some engines; all of thousands would make errors of 100 kB."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f", and {more} more" if more > 0 else "")


def first_of(models: Set[str], last: Set[str] = frozenset()) -> str:
    """Name the first of some models, and how many more there are; ``last``: those that are named after the others."""
    names = sorted(models, key=lambda name: (name in last, name))
    more = len(names) - _MOST_MODELS
    named = ", ".join([clipped(name) for name in names[:_MOST_MODELS]])
    return f"{named}, and {more} more" if more > 0 else named or "none"


def clipped(name: str) -> str:
    """Return as much of a model's name as a message has room for: a client, or an engine, may write megabytes."""
    return name if len(name) <= _NAME_MOST else name[:_NAME_MOST] + "..."


def _say_drained(member: Member, drain: Drain) -> None:
    if member.life.state is HealthState.DRAINING:
        member.life.why = f"is to be drained{', and its streams move' if drain.moves else ''}"


def _place(instance: Instance) -> tuple[Role, str, int]:
    return instance.pool, instance.address.host, instance.address.port
