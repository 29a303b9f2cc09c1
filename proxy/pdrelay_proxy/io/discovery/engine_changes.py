"""Carries out what operators order of engines, at all routers of a store."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pdrelay_proxy.core.discovery.sources import key_of
from pdrelay_proxy.core.discovery.store_entries import (
    Assignment,
    assignment_name,
    assignment_of,
    entry_name,
    entry_of,
)
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, InstanceId, Role
from pdrelay_proxy.errors import AlreadyKnown, CannotTurn, UnknownInstance
from pdrelay_proxy.io.discovery.entries import Entries
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.io.discovery.store import Store, StoreDown

_TRIES: Final = 5  # to change an entry that other routers change, too


class NotManagedHere(Exception):
    """The operator's request is for another system; the message says for which."""


class EngineChanges:
    """Writes changes to the store, whose next view brings them to all routers, this one, too."""

    def __init__(
        self, registry: Registry, reconciler: Reconciler, entries: Entries, store: Store
    ) -> None:
        self._registry = registry
        self._roles = reconciler.roles
        self._clock = reconciler.clock
        self._entries = entries  # the store's observer
        self._store = store

    async def add(self, role: Role, target: Target) -> None:
        """Add an engine for all routers of the store.

        Raises AlreadyKnown, or StoreDown: the store has not acknowledged it.
        """
        wanted = Wanted(role, target, added=secrets.token_hex(8))
        for member in self._registry.members():
            if key_of(member) == wanted.key and not member.retires:
                raise AlreadyKnown(
                    f"{target.address.authority} is already known as {member.instance.id}"
                )
        if wanted.key in self._roles.assignments:  # of an earlier engine at this address
            await self._store.delete(assignment_name(wanted.key))
        await self._store.put(entry_name(wanted.key), entry_of(wanted))

    async def remove(self, name: InstanceId) -> None:
        """Take an engine out; if the store has its rank, the other ranks at its address go, too.

        Raises:
            UnknownInstance: no engine has this id, or another one was added at its address since.
            NotManagedHere: its pod is still there.
            StoreDown: the store has not acknowledged it.
        """
        member = self._registry.member(name)
        if member.origin.source is EngineSource.PODS:
            raise NotManagedHere(
                f"{name} is a pod, and would be back at once: drain it, or delete the pod"
            )
        await self._rewrite(member, lambda _: None)
        if key_of(member) in self._roles.assignments:
            await self._store.delete(assignment_name(key_of(member)))
        if self._registry.get(name) is member and member.origin.wanted is None:
            self._registry.remove(name, now=self._clock())

    async def drain(self, name: InstanceId, *, moves: bool = False) -> None:
        """Send an engine nothing new: at all routers of the store if it has an entry there, else at
        this one.

        ``moves``: its streams go on at other engines. Raises as remove.
        """
        await self._leave(name, leaves=True, moves=moves)
        if self._registry.get(name) is not None:
            self._registry.departures.drain(name, now=self._clock(), moves=moves)

    def is_drain_shared(self, member: Member) -> bool:
        """Return whether the other routers of the store know of a drain, too."""
        wanted = member.origin.wanted
        return _has_entry(member) or member.retires or (wanted is not None and wanted.leaves)

    async def undrain(self, name: InstanceId) -> None:
        """Send it requests again, and end a role change that is under way, for all routers of the
        store.

        Raises as remove, and AlreadyKnown: its address has been added anew.
        """
        member = self._registry.member(name)
        if member.turn is not None:
            await self._assign(member, member.role)
        await self._leave(name, leaves=False)
        self._registry.departures.undrain(name, now=self._clock())

    async def change_role(self, name: InstanceId, to: EngineRole, *, force: bool = False) -> None:
        """Change an engine's role, at all routers of the store, as soon as its last request in the
        old one is over.

        A turn to the current role ends the role change that is under way. This returns when the
        change has begun; the registry's member has its progress.

        Raises:
            UnknownInstance: no engine has this id.
            CannotTurn: it cannot change its role, or is the last one of the role that it leaves,
                and ``force`` is not set.
            StoreDown: the store has not acknowledged it.
        """
        self._registry.departures.check_role_change(name, to, force=force)
        await self._forget_assignments()
        member = self._registry.member(name)
        before = member.role
        heading = member.heading
        await self._assign(member, to)
        if force or heading is to or self._registry.get(name) is not member:
            return
        try:
            # Other routers may have started a role change at the same moment.
            self._registry.departures.check_begun(name, before, to)
        except CannotTurn:
            if self._roles.role_of(member) is to:
                await self._assign(member, heading)
            raise

    async def _assign(self, member: Member, role: EngineRole) -> None:
        key = key_of(member)
        wanted = member.origin.wanted
        if role is (EngineRole(key.role.value) if wanted is None else wanted.serves):
            await self._store.delete(assignment_name(key))
        else:
            identity = "" if wanted is None else wanted.identity
            await self._store.put(
                assignment_name(key), assignment_of(Assignment(key, role, identity))
            )

    async def _forget_assignments(self) -> None:
        """Drop the assignments of pods that are gone."""
        for key in self._roles.of_gone_pods():
            await self._store.delete(assignment_name(key))

    async def _leave(self, name: InstanceId, *, leaves: bool, moves: bool = False) -> None:
        member = self._registry.member(name)
        if not _has_entry(member):
            return  # other routers have no entry of it
        await self._rewrite(
            member,
            lambda entry: replace(entry, leaves=leaves, moves=leaves and (moves or entry.moves)),
        )

    async def _rewrite(self, member: Member, change: Callable[[Wanted], Wanted | None]) -> None:
        """Change what the store has of an engine, or drop it (None), if it is still there: one
        entry, or those that somebody has written by hand.

        Raises UnknownInstance: another router has added another engine at its address since.
        """
        for entry_id in self._entries.names_at(key_of(member)):
            await self._rewrite_entry(entry_id, member, change)

    async def _rewrite_entry(
        self, entry_id: str, member: Member, change: Callable[[Wanted], Wanted | None]
    ) -> None:
        own = member.origin.wanted
        for _ in range(_TRIES):  # other routers may change it at the same moment
            entry = self._entries.engine(entry_id)
            if entry is None or entry[1].key != key_of(member):
                return
            text, engine = entry
            if own is not None and own.added and engine.added and own.added != engine.added:
                raise UnknownInstance(
                    f"{member.instance.id} is gone: another engine has been added at its address"
                )
            wanted = change(engine)
            if wanted == engine or await self._store.replace(
                entry_id, text, None if wanted is None else entry_of(wanted)
            ):
                return
        raise StoreDown(
            f"others have changed what the store has of {member.instance.id} {_TRIES} times "
            f"meanwhile"
        )


def _has_entry(member: Member) -> bool:
    """Return whether the store has an entry of this engine alone."""
    wanted = member.origin.wanted
    return (
        wanted is not None
        and member.origin.source is EngineSource.STORE
        and len(wanted.target.ranks) <= 1
    )
