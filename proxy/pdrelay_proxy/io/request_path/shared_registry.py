"""A registry whose engines have the same ids in all workers, and do what an operator has told any of them."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Member, Registry
from pdrelay_proxy.core.fleet.target import BY_HAND, EngineSource, Key, Origin, Target
from pdrelay_proxy.core.fleet.turns import RoleTurn, TurnEvent
from pdrelay_proxy.core.model import EngineRole, Instance, InstanceId, Role
from pdrelay_proxy.core.workers.instance_ids import Verb, key_of, turned_of, turned_text
from pdrelay_proxy.errors import AlreadyKnown, IdLogBusy
from pdrelay_proxy.io.request_path.id_log import InstanceIdLog
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
_LEAVES: Final = {
    Verb.DRAIN: "drained",
    Verb.MOVE: "drained by moving its streams",
    Verb.UNDRAIN: "in use again",
    Verb.REMOVE: "removed",
}


class SharedRegistry(Registry):
    """Asks the ledger for every id."""

    def __init__(self, settings: Settings, ledger: InstanceIdLog, *, counts: bool = True) -> None:
        super().__init__(settings)
        self._ledger = ledger
        self._counts = counts  # turns, which are those of all workers
        self.is_drained_elsewhere: Callable[[InstanceId], bool] = lambda _: True  # for the other workers
        self._has_begun = False
        self._named: dict[str, InstanceId] = {}  # by key
        self._keys: dict[InstanceId, str] = {}  # the other way round, also of those that retire
        self._first: set[InstanceId] = set()  # those that no worker knew before this one

    def begin(self, *, now: float) -> None:
        """Be up to date: what the settings name by now is what all workers began with."""
        self._has_begun = True
        self.follow(now=now)

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
        """Start to route to an engine, as all workers do, unless one of them was told to remove it.

        Raises AlreadyKnown, or IdLogBusy: no worker has named it yet, and it cannot be named now.
        """
        identity = "" if origin.wanted is None else origin.wanted.identity or origin.wanted.added
        key = key_of(role, address.authority, rank, origin.source, identity)
        self._added[role], is_first = self._ledger.named(key, anew=self._has_begun)
        instance = super().add(role, address, rank=rank, facts=facts, now=now, origin=origin)
        self._named[key], self._keys[instance.id] = instance.id, key
        if is_first:
            self._first.add(instance.id)
        if (turned := self._ledger.roster.role(instance.id)) is not None:
            super().turn(instance.id, turned, now=now, at_once=True)
        member = self.member(instance.id)
        self._obey(self._ledger.roster.order(instance.id), instance.id, now=now)
        self._ledger.catch_up(instance.id)
        return member.instance

    def add_target(self, role: Role, target: Target, *, now: float, origin: Origin = BY_HAND) -> Sequence[Instance]:
        """Do the same for all ranks of an engine, or for none; raises AlreadyKnown, or IdLogBusy."""
        place = [Key(role, target.address.authority)]
        before = {member.instance.id for member in self.members_at(place)}
        try:
            return super().add_target(role, target, now=now, origin=origin)
        except IdLogBusy:
            for member in self.members_at(place):
                if member.instance.id not in before:
                    self._forget(member.instance.id, now=now)  # the other workers keep it
            raise

    def remove(self, name: InstanceId, *, now: float) -> None:
        """Forget an engine; raises UnknownInstance. If its source names it again, it has another id."""
        is_static = self.member(name).origin.source is EngineSource.STATIC
        self._forget(name, now=now)
        if not is_static:
            self._ledger.say(Verb.CLOSE, name)

    def retire(self, name: InstanceId, *, now: float) -> None:
        """Send it nothing new, and forget it soon; raises UnknownInstance."""
        super().retire(name, now=now)
        self._ledger.say(Verb.CLOSE, name)

    def turn(self, name: InstanceId, to: EngineRole, *, now: float, at_once: bool = False) -> None:
        """Have an engine serve another role; raises UnknownInstance.

        ``at_once``: nothing of this worker is there. The others may have something there, and be turning it, unless
        none of them has known it before: then all of them serve the role at once.
        """
        member = self.member(name)
        before = member.role
        super().turn(name, to, now=now, at_once=at_once and (name in self._first or not member.leaves_by(to)))
        if at_once and name in self._first and member.role is not before:
            self._ledger.say(Verb.TURNED, turned_text(name, member.role))

    def follow(self, *, now: float) -> None:
        """Go by what other workers have written."""
        for verb, text in self._ledger.news():
            name = InstanceId(text)
            if verb is Verb.NAME:
                self._rename(text, now=now)
            elif verb is Verb.TURNED:
                self._follow_turn(*turned_of(text), now=now)
            elif self.get(name) is not None:
                self._obey(verb, name, now=now)
                logger.info("%s is %s, as another worker was told", name, _LEAVES[verb])

    def _follow_turn(self, name: InstanceId, role: EngineRole, *, now: float) -> None:
        """Serve what another worker serves by now: it has heard that all of them are ready, or that time is over."""
        member = self.get(name)
        if member is None or (member.turn is None and member.role is role):
            return
        if member.turn is not None and member.turn.to is role:
            self._end_turn(member, TurnEvent.EMPTY, now=now)
        else:  # the store has not told of it yet
            super().turn(name, role, now=now, at_once=True)
        logger.info("%s serves %s, as another worker does", name, role)

    def _has_left(self, member: Member, event: TurnEvent, *, now: float) -> None:
        """Let the other workers know, who then do not wait for each other."""
        super()._has_left(member, event, now=now)
        self._ledger.say(Verb.TURNED, turned_text(member.instance.id, member.role))

    def _count_turn(self, turn: RoleTurn) -> None:
        if self._counts:
            super()._count_turn(turn)

    def _is_drained_elsewhere(self, name: InstanceId) -> bool:
        return self.is_drained_elsewhere(name)

    def _rename(self, key: str, *, now: float) -> None:
        """Another worker has seen an engine go and come again, which happened too fast for this one."""
        old, current = self._named.get(key), self._ledger.roster.name(key)
        member = None if old is None else self.get(old)
        if member is None or member.retires or current in (old, None):  # None: it went again, as its source will say
            return
        one = member.instance
        self._forget(one.id, now=now)
        if self._ledger.roster.is_removed(key):
            logger.info("%s went and came again, and was removed", one.id)
            return
        new = self.add(one.pool, one.address, rank=one.rank, facts=member.facts, now=now, origin=member.origin)
        logger.info("%s went and came again: it is %s now", one.id, new.id)

    def _forget(self, name: InstanceId, *, now: float) -> None:
        key = self._keys.pop(name, None)
        if key is not None and self._named.get(key) == name:  # else another one has come to its place
            del self._named[key]
        self._first.discard(name)
        super().remove(name, now=now)

    def _obey(self, verb: Verb | None, name: InstanceId, *, now: float) -> None:
        match verb:
            case Verb.DRAIN:
                self.drain(name, now=now)
            case Verb.MOVE:
                self.drain(name, now=now, moves=True)
            case Verb.REMOVE:
                self.remove(name, now=now)
            case Verb.UNDRAIN:
                try:
                    self.undrain(name, now=now)
                except AlreadyKnown as exc:
                    logger.warning("%s stays drained: %s", name, exc)
            case _:
                pass
