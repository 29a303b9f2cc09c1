"""Which engines exist, and what is known of each: one record, which dies in one line."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, PairsWithin, fit, rests
from pdrelay_proxy.core.fleet.departures import Departures
from pdrelay_proxy.core.fleet.fleet_models import FleetModels
from pdrelay_proxy.core.fleet.health import SERVING, WELL, EngineHealth, HealthState
from pdrelay_proxy.core.fleet.lone_prompts import LonePrompts
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.member_table import MemberTable
from pdrelay_proxy.core.fleet.pair_history import Pair, PairTrouble
from pdrelay_proxy.core.fleet.target import BY_HAND, EngineSource, Key, Origin, Target
from pdrelay_proxy.core.fleet.twins import Twins, twin_key
from pdrelay_proxy.core.fleet.usable_engines import UsableEngines
from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.errors import AlreadyKnown
from pdrelay_proxy.settings import Settings

_STAYING: Final = SERVING | {HealthState.EJECTED}  # those that are not on their way out


class Registry:
    """The engines, which come and go while requests are served.

    Times are seconds of a clock that only rises.
    """

    def __init__(
        self, settings: Settings | None = None, pairs_within: PairsWithin = lambda _slice: None
    ) -> None:
        """``pairs_within``: what the partners of an engine of a slice must have; None: nothing."""
        self._settings = settings or Settings()
        self._pairs_within = pairs_within
        table = self._table = MemberTable()
        self.get: Final = table.get  # what is known of an engine; None if it was removed meanwhile
        self.changes: Final = table.changes
        # changes of what decides which engines there should be: not of their health
        self.lineup: Final = table.lineup
        self.models: Final = FleetModels(table)
        self.twins: Final = Twins(table)
        self.departures: Final = Departures(table, self._has_turned)
        # why decode engines load no KV of prefill engines, as they show it now
        self.troubles: Final = dict[Pair, PairTrouble]()
        self._usable: Final = UsableEngines(table, self.twins)
        self._claims: Final = dict[Key, Target]()  # that wait for their place
        self._hear_left: Final = list[Callable[[InstanceId], None]]()

    # ---- which engines there are

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
        """Route to an engine, or one rank of it, under a new id; raises AlreadyKnown."""
        self._table.check_new(role, address, rank)
        name = self._table.new_id(role)
        instance = Instance(name, role, address, rank)
        life = EngineHealth(
            now, self._settings, changes=self.changes, is_needed=partial(self._is_needed, name)
        )
        member = Member(
            instance, life, facts=self.models.shared(facts or EngineCapabilities()), origin=origin
        )
        self._table.add(member)
        self.twins.recount(None, twin_key(member))
        return instance

    def add_target(
        self, role: Role, target: Target, *, now: float, origin: Origin = BY_HAND
    ) -> Sequence[Instance]:
        """Route to an engine, or to each of its data-parallel ranks; raises AlreadyKnown."""
        within = self._pairs_within(target.slice)
        facts = EngineCapabilities(
            mode=target.mode, revision=target.revision, slice=target.slice, pairs_within=within
        )
        return [
            self.add(role, target.address, rank=rank, facts=facts, now=now, origin=origin)
            for rank in target.ranks
        ]

    def claim(self, role: Role, target: Target) -> None:
        """Keep what is at an address whatever discovery says of it: the settings name it.

        Where an engine of the other pool serves the role now, the claim waits until it does not.
        """
        key = Key(role, target.address.authority)
        self._claims[key] = target
        self._keep_claimed(key)

    def unclaim(self, role: Role, authority: str) -> None:
        """Wait no more: the settings do not name it any longer."""
        self._claims.pop(Key(role, authority), None)

    def add_claimed(self, *, now: float) -> Sequence[Instance]:
        """Add the engines whose place is free by now."""
        added = list[Instance]()
        for key, target in tuple(self._claims.items()):
            if not self._keep_claimed(key):
                with suppress(AlreadyKnown):
                    added += self.add_target(key.role, target, now=now)
                    del self._claims[key]
        return added

    def _keep_claimed(self, key: Key) -> bool:
        """Return whether an engine is there that discovery may not take away any more."""
        present = [member for member in self.members_at([key]) if not member.retires]
        for member in present:
            member.origin = BY_HAND
            self.lineup.count += 1
        if present:
            del self._claims[key]
        return bool(present)

    def is_given(self, address: Address) -> bool:
        """Tell whether the settings or a pod name what is at an address, not an operator."""
        return any(
            member.origin.source is not EngineSource.STORE for member in self._table.at(address)
        )

    def remove(self, name: InstanceId, *, now: float) -> None:
        """Forget an engine; its legs go on, and are nobody's.

        Raises UnknownInstance: there is none of this id.
        """
        member = self.member(name)
        self.departures.remove(member, now=now)
        member.life.remove(now=now)
        self._table.remove(member)
        self.twins.recount(twin_key(member), None)
        self._left(name)

    def settle(self, *, patience_s: float, now: float) -> Sequence[Instance]:
        """Return the engines that are drained now; those that retire are forgotten."""
        drained = self.departures.settle(patience_s=patience_s, now=now)
        for member in self.members():
            if member.retires and member.life.state is HealthState.DRAINED:
                self.remove(member.instance.id, now=now)
        return drained

    def member(self, name: InstanceId) -> Member:
        """Return what is known of an engine. Raises UnknownInstance: there is none of this id."""
        return self._table.member(name)

    def members(self) -> Sequence[Member]:
        """List all engines, in the order they were added."""
        return tuple(self._table.by_id.values())

    def members_at(self, places: Iterable[Key]) -> Sequence[Member]:
        """List the engines of some places, also those that retire."""
        return self._table.at_keys(places)

    # ---- which of them may get a request

    def known(self, role: Role, /) -> Sequence[Instance]:
        """List the engines of a role, also those that must not get a request now, in the order they
        were added.
        """
        return tuple([instance for _, instance in self._table.serving[role].values()])

    def usable(self, role: Role, /, *, now: float = 0.0) -> Sequence[Instance]:
        """List the engines of a role that can take a request; raises NoInstance."""
        return self._usable.of(role, now)

    @property
    def steady_until(self) -> float:
        """When the passing of time may change which engines are usable."""
        return self._usable.steady_until

    def _is_needed(self, name: InstanceId) -> bool:
        """Tell whether an engine is the last one of a role, or more than half of that role would be
        away without it.
        """
        member = self.get(name)
        if member is None:
            return False
        for role in Role:
            if not member.role.serves(role):
                continue
            others = [
                other for other in self._table.others(member, role) if other.life.state in _STAYING
            ]
            there = [
                other for other in others if other.life.state in WELL and not other.life.is_away
            ]
            if not there or 2 * (len(others) - len(there) + 1) > len(others) + 1:
                return True
        return False

    # ---- what is known of them

    def fitting(
        self, prefill: Instance, decode: Sequence[Instance], /, model: str | None = None
    ) -> Sequence[Instance]:
        """List those decode engines that can read a model's blocks of a prefill engine; what is not
        known fits everything.
        """
        return [instance for instance in decode if self.fits(prefill, instance, model)]

    def fits(self, prefill: Instance, decode: Instance, model: str | None = None) -> bool:
        """Tell whether two engines can share a request for a model, as far as it is known, and do
        not rest as a pair.

        One that serves both roles shares none with itself: there would be nothing to transfer.
        """
        facts = self.facts(decode)
        return (
            prefill.id != decode.id
            and fit(self.facts(prefill), facts, model)
            and not rests(prefill.id, facts)
        )

    def facts(self, instance: Instance) -> EngineCapabilities:
        """Return what is known of an engine that decides with whom it can share a request."""
        member = self.get(instance.id)
        return EngineCapabilities() if member is None else member.facts

    def learn(self, name: InstanceId, facts_found: EngineCapabilities) -> None:
        """Take in facts; unknown ones, and those of a removed engine, change nothing."""
        if (member := self.get(name)) is not None:
            facts = self.models.shared(member.facts.updated(facts_found))
            if facts != member.facts:
                self.lineup.count += facts.kv_role != member.facts.kv_role  # it may turn now
                before = twin_key(member)
                member.facts = facts
                self.changes.count += 1
                self.twins.recount(before, twin_key(member))

    def _has_turned(self, member: Member) -> None:
        """Forget what was true of an engine in the role that it has left.

        Its prefix cache is what it was, and so is what is known of it: the process is the same.
        """
        member.lone = LonePrompts()
        member.load.report = None
        self._left(member.instance.id)

    def tell_departures(self, hear: Callable[[InstanceId], None]) -> None:
        """Have this called with each engine that is removed, or serves another role from now on."""
        self._hear_left.append(hear)

    def _left(self, name: InstanceId) -> None:
        for hear in self._hear_left:
            hear(name)
