"""Carries out what the sources say, and lets operators say something themselves."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final, TypeAlias

from pdrelay_proxy.core.discovery.reconcile import (
    Action,
    Assignment,
    Freshness,
    Sources,
    assignment_name,
    assignment_of,
    diff,
    entry_name,
    entry_of,
    read_entry,
    shown_name,
)
from pdrelay_proxy.core.discovery.unnamed_assignments import UnnamedAssignments
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Origin, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, InstanceId, Role
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.errors import AddressError, AlreadyKnown, CannotTurn, UnknownInstance
from pdrelay_proxy.io.background import Running, meanwhile, repeatedly
from pdrelay_proxy.io.discovery.stores import Store, StoreDown

logger = logging.getLogger(__name__)
# a source that was not heard for longer may not know what there is; a watch says so by then
_FRESH_S: Final = 90.0
# seconds between two looks at the assignments of engines that may be gone
_ASSIGNMENTS_S: Final = 5.0
_AT_ONCE: Final = 20  # places that are compared in one step
_READ_AT_ONCE: Final = 200  # objects that are sorted in one step: less than a millisecond
_TEXTS_AT_ONCE: Final = 50  # likewise, that are read
_TRIES: Final = 5  # to change an entry that others change, too
_TICK_S: Final = 1.0  # seconds between two looks without a reason: what retired may have made room


class NotManagedHere(Exception):
    """What is asked for is another's to decide; the message says whose, and what can be done."""


class Reconciler:
    """Makes the registry what the sources say that it should be, whenever one of them says
    something new.
    """

    def __init__(
        self, registry: Registry, sources: Iterable[EngineSource], clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self.clock = clock  # seconds; the one of the registry's times
        self.sources = Sources(sources, now=clock())
        self.assignments: Mapping[Key, Assignment] = {}  # of engines that have turned, or shall
        self._begins = True  # the store has not been heard, so this router has just started
        # changes of the registry, and of the views, when all was compared last
        self._compared = -1, -1
        self._full = set[EngineSource]()  # those that name more engines than a router takes

    def view(self, source: EngineSource, engines: Iterable[Wanted]) -> None:
        """Take in all that a source says."""
        finish(self.view_in_steps(source, engines))

    def view_in_steps(self, source: EngineSource, engines: Iterable[Wanted]) -> Generator[None]:
        """Take in the same in steps, between which requests are served; the source has been heard
        after the last.
        """
        is_first = not self.sources.views[source].is_synced
        for changed in self.sources.replace_in_steps(source, engines, now=self.clock()):
            self._compare(changed)
            yield
        self._say_if_full(source)
        if is_first and source is EngineSource.PODS:
            logger.info(
                "there are %d engines among the pods", len(self.sources.views[source].engines)
            )

    def change(self, source: EngineSource, engines: Mapping[Key, Wanted | None]) -> None:
        """Take in what a source says of some places; the others are not looked at.

        None: no engine is there.
        """
        changed = self.sources.change(source, engines, now=self.clock())
        self._compare(changed)
        self._say_if_full(source)

    def _say_if_full(self, source: EngineSource) -> None:
        view = self.sources.views[source]
        if not view.left_out:
            self._full.discard(source)
        elif source not in self._full:
            self._full.add(source)
            said = "%s: there are more than %d engines: %d left out until others have gone"
            logger.error(said, source, len(view.engines), len(view.left_out))

    def heard(self, source: EngineSource) -> None:
        """Note that what a source said last is still so."""
        self.sources.heard(source, now=self.clock())

    def freshness(self) -> Sequence[Freshness]:
        """Say of each source how well it is known."""
        return self.sources.freshness(now=self.clock())

    def reconcile(self) -> Generator[None]:
        """Compare everything, if anything may have changed since: an engine that has retired may
        have made room.

        In steps of some places, between which requests are served: thousands of engines take longer
        than a request may.
        """
        changes = (
            self._registry.lineup.count,
            sum(view.generation for view in self.sources.views.values()),
        )
        if self._compared == changes:
            return
        seen = set[Key]()
        members = self._registry.members()
        # first: one that goes makes room for another
        for begin in range(0, len(members), _AT_ONCE):
            keys = {_key(member) for member in members[begin : begin + _AT_ONCE]}
            self._compare(keys)
            seen |= keys
            yield
        for view in self.sources.views.values():
            rest = [key for key in view.engines if key not in seen]
            for begin in range(0, len(rest), _AT_ONCE):
                self._compare(rest[begin : begin + _AT_ONCE])
                yield
        self._compared = changes  # what has changed since is compared the next time

    def _compare(self, keys: Iterable[Key]) -> None:
        """Compare what there should be at some places with what there is, and carry out the
        difference.
        """
        present = self._registry.members_at(keys)
        self._carry_out(self.sources.desired_at(keys), present)
        if EngineSource.STORE not in self.sources.missing:  # else it is not known what has turned
            self._turn_all([member for member in present if self._is_known(member)])

    def assign_in_steps(
        self, assignments: Mapping[Key, Assignment], view: Generator[None]
    ) -> Generator[None]:
        """Take in what engines serve in place of what their sources say, and a view of the store,
        in its steps.

        A router that has just started has nothing at engines that have turned: they serve their
        role at once, before the store has been heard, after which requests may come.
        """
        before = self.assignments
        self.assignments = assignments
        if self._begins:
            # those that come with the view serve it from the beginning
            members = self._registry.members()
            for begin in range(0, len(members), _AT_ONCE):
                self._turn_all(
                    [one for one in members[begin : begin + _AT_ONCE] if self._is_known(one)]
                )
                yield
        yield from view
        if not self._begins:
            changed = [
                key for key in {**before, **assignments} if before.get(key) != assignments.get(key)
            ]
            for begin in range(0, len(changed), _AT_ONCE):
                self._turn_all(self._registry.members_at(changed[begin : begin + _AT_ONCE]))
                yield
        self._begins = False

    def _is_known(self, member: Member) -> bool:
        return self._registry.get(member.instance.id) is member

    def role_of(self, member: Member) -> EngineRole:
        """Return what an engine should serve."""
        found = self.assignments.get(_key(member))
        wanted = member.origin.wanted
        if found is None or not found.means("" if wanted is None else wanted.identity):
            return EngineRole(member.instance.pool.value) if wanted is None else wanted.serves
        return found.serves

    def of_gone_pods(self) -> Sequence[Key]:
        """List the assignments of pods that are gone; none while it is not known which pods there
        are.

        A pod that is not Ready is there, also if it is no engine of this router yet.
        """
        pods = self.sources.views.get(EngineSource.PODS)
        if pods is None or self.sources.missing or self.clock() > pods.heard + _FRESH_S:
            return ()
        return [
            key
            for key, found in self.assignments.items()
            if found.identity and not self._is_there(key, found)
        ]

    def is_named(self, found: Assignment) -> bool | None:
        """Tell whether a source of this router names the engine of an assignment; None: that is not
        known now.

        One that the settings name no longer is there until it has nothing left. Whether a pod is
        there, only a router that watches pods can tell.
        """
        if self._is_there(found.key, found):
            return True
        views = self.sources.views
        if found.identity and EngineSource.PODS not in views:
            return None
        is_known = all(
            view.is_synced and self.clock() <= view.heard + _FRESH_S for view in views.values()
        )
        return False if is_known else None

    def _is_there(self, key: Key, assignment: Assignment) -> bool:
        wanted = [
            view.engines.get(key) or view.left_out.get(key) for view in self.sources.views.values()
        ]
        if any(one is not None and assignment.means(one.identity) for one in wanted):
            return True
        # the settings name it
        return any(member.origin.wanted is None for member in self._registry.members_at([key]))

    def _turn_all(self, members: Sequence[Member]) -> None:
        """Have engines serve what they should."""
        for member in members:
            role = self.role_of(member)
            if member.heading is not role:
                self._turn(member, role, at_once=self._begins)

    def _turn(self, member: Member, role: EngineRole, *, at_once: bool) -> None:
        before = member.turn
        self._registry.departures.turn(member.instance.id, role, now=self.clock(), at_once=at_once)
        if member.heading is role:
            verb = "serves" if member.turn is None else "turns to"
            logger.info(
                "%s %s %s%s",
                member.instance.id,
                verb,
                role,
                "" if before is None else ", and not as before",
            )

    def _carry_out(self, desired: Mapping[Key, Origin], present: Sequence[Member]) -> None:
        current = dict[Key, Origin]()
        members = dict[Key, list[Member]]()
        for member in present:
            if not member.retires:
                key = _key(member)
                current[key] = member.origin
                members.setdefault(key, []).append(member)
        for action in diff(desired, current):
            if action.verb == "add":
                self._add(action)
            for member in members.get(action.key, ()):
                self._change(action, member)

    def _add(self, action: Action) -> None:
        wanted = action.origin.wanted
        if wanted is None:
            return
        try:
            added = self._registry.add_target(
                wanted.role, wanted.target, now=self.clock(), origin=action.origin
            )
        except AlreadyKnown as exc:
            logger.warning("%s", exc)
        else:
            for instance in added:
                logger.info(
                    "%s is at %s (%s)", instance.id, wanted.target.address.url, action.origin.source
                )
                member = self._registry.member(instance.id)
                if member.heading is not (role := self.role_of(member)):
                    self._turn(member, role, at_once=True)

    def _change(self, action: Action, member: Member) -> None:
        name = member.instance.id
        now = self.clock()
        match action.verb:
            case "remove":
                self._registry.remove(name, now=now)
                logger.info("%s is gone: %s no longer names it", name, action.origin.source)
            case "drain":
                moves = action.origin.wanted is not None and action.origin.wanted.moves
                self._registry.departures.drain(name, now=now, moves=moves)
            case "undrain":
                self._registry.departures.undrain(name, now=now)
            case "adopt" | "add":
                pass
        member.origin = action.origin


class Pods:
    """Hears what a source sees: engines, and objects that say something impossible.

    The source is the watch of pods.
    """

    def __init__(self, reconciler: Reconciler, source: EngineSource = EngineSource.PODS) -> None:
        self._reconciler = reconciler
        self._source = source
        self._said: set[str] = set()
        self._objects: dict[str, Wanted | AddressError | None] = {}
        # engines by place, and then by object: two may claim one
        self._named: dict[Key, dict[str, Wanted]] = {}

    def view(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take all objects."""
        finish(self.listed(objects))

    def listed(self, objects: Mapping[str, Wanted | AddressError | None], /) -> Generator[None]:
        """Take all objects, in steps; ``changed`` must wait until they are done."""
        said = set[str]()
        named = dict[Key, dict[str, Wanted]]()
        for number, (name, one) in enumerate(objects.items(), start=1):
            if isinstance(one, Wanted):
                named.setdefault(one.key, {})[name] = one
            elif isinstance(one, AddressError):
                said.add(str(one))
            if number % _READ_AT_ONCE == 0:
                yield
        for text in sorted(said - self._said):
            logger.warning("left out: %s", text)
        self._said = said
        self._objects = dict(objects)
        self._named = named
        yield from self._reconciler.view_in_steps(
            self._source, (one for one in objects.values() if isinstance(one, Wanted))
        )

    async def take(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take all objects; others run between the steps.

        One view at a time, and ``changed`` waits for it.
        """
        for _ in self.listed(objects):
            await asyncio.sleep(0)

    def changed(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take some objects that have changed; None: it is gone, or no engine.

        The others are as they were.
        """
        finish(self.changed_in_steps(objects))

    def changed_in_steps(
        self, objects: Mapping[str, Wanted | AddressError | None]
    ) -> Generator[None]:
        """Take the same in steps, first the places where no engine is any more, which makes
        room.
        """
        keys = dict[Key, None]()
        for number, (name, new) in enumerate(objects.items(), start=1):
            old = self._objects.pop(name, None)
            if isinstance(old, Wanted):
                keys[old.key] = None
                self._named[old.key].pop(name, None)
            elif isinstance(old, AddressError):
                self._said.discard(str(old))
            if new is not None:
                self._objects[name] = new
            if isinstance(new, Wanted):
                keys[new.key] = None
                self._named.setdefault(new.key, {})[name] = new
            elif isinstance(new, AddressError) and str(new) not in self._said:
                self._said.add(str(new))
                logger.warning("left out: %s", new)
            if number % _READ_AT_ONCE == 0:
                yield
        order = sorted(keys, key=lambda key: bool(self._named.get(key)))
        # also if none is another: the source was heard
        for begin in range(0, len(order), _AT_ONCE) or (0,):
            self._reconciler.change(
                self._source, {key: self._at(key) for key in order[begin : begin + _AT_ONCE]}
            )
            yield

    def heard(self) -> None:
        """Pass it on."""
        self._reconciler.heard(self._source)

    def _at(self, key: Key) -> Wanted | None:
        """Return the engine of a place: of two, the one that stays counts, else the one that was
        named last.
        """
        named = self._named.get(key)
        if not named:
            self._named.pop(key, None)
            return None
        return sorted(named.values(), key=lambda one: not one.leaves)[-1]


class Entries:
    """Hears what the store has: texts, which somebody may have edited."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self._view = Pods(reconciler, EngineSource.STORE)
        self._texts: Mapping[str, str] = {}  # by name, as they were heard last
        self._assignments: dict[str, Assignment] = {}  # likewise
        self._waiting: Mapping[str, str] | None = None  # the latest view, until it is its turn
        self._turn = asyncio.Lock()
        self.heard = self._view.heard

    def text(self, name: str) -> str | None:
        """Return an entry as it was heard last; None: there is none."""
        return self._texts.get(name)

    async def take(self, entries: Mapping[str, str], /) -> None:
        """Take all entries, or those of a later view, after the view that is being taken in; others
        run in between.
        """
        self._waiting = entries
        async with self._turn:
            while (latest := self._waiting) is not None:
                self._waiting = None
                steps = self.in_steps(latest)
                try:
                    for _ in steps:
                        await asyncio.sleep(0)
                finally:
                    # a task that is cancelled leaves no view half taken: its store would not tell
                    # it again
                    finish(steps)

    def view(self, entries: Mapping[str, str]) -> None:
        """Take all entries at once."""
        finish(self.in_steps(entries))

    def in_steps(self, entries: Mapping[str, str]) -> Generator[None]:
        """Take all entries; only those are looked at that have changed, of what may be
        thousands.
        """
        before = self._texts
        self._texts = dict(entries)
        engines = dict[str, Wanted | AddressError | None]()
        for name in before:
            if name not in entries:
                engines[name] = None
                self._assignments.pop(name, None)
        changed = [(name, text) for name, text in entries.items() if before.get(name) != text]
        for number, (name, text) in enumerate(changed, start=1):
            one = _entry(text)
            self._assignments.pop(name, None)
            if isinstance(one, Assignment):
                engines[name] = None
                self._assignments[name] = one
            else:
                engines[name] = (
                    one
                    if isinstance(one, Wanted)
                    else AddressError(f"entry {shown_name(name)}: {one}")
                )
            if number % _TEXTS_AT_ONCE == 0:
                yield
        is_first = EngineSource.STORE in self._reconciler.sources.missing
        view = self._view.listed(engines) if is_first else self._view.changed_in_steps(engines)
        found = [self._assignments[name] for name in entries if name in self._assignments]
        yield from self._reconciler.assign_in_steps({one.key: one for one in found}, view)


# What tells a reconciler of engines: is given it, and returns what runs while the router serves.
# Raises ConfigError.
EngineFeed: TypeAlias = Callable[[Reconciler], Running]


class Discovery:
    """All sources while they run, and what an operator may change.

    Changes are made where all routers see them.
    """

    def __init__(
        self,
        registry: Registry,
        reconciler: Reconciler,
        entries: Entries,
        store: Store,
        *,
        feeds: Sequence[Running] = (),
    ) -> None:
        self._registry = registry
        self._reconciler = reconciler
        self._entries = entries  # what hears the store
        self._store = store
        self._feeds = feeds
        self._unnamed = UnnamedAssignments()
        self._looked_at = reconciler.clock()  # seconds; when the assignments were looked at last
        self.freshness = reconciler.freshness

    @property
    def missing(self) -> Sequence[EngineSource]:
        """List the sources that have not been heard yet."""
        return self._reconciler.sources.missing

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Follow all sources while the block lasts."""
        trouble = "the engines could not be compared with what the sources say"
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._store.running())
            for feed in self._feeds:
                await stack.enter_async_context(feed())
            await stack.enter_async_context(
                meanwhile(repeatedly(_TICK_S, self._reconcile, logger, trouble))
            )
            yield

    async def add(self, role: Role, target: Target) -> None:
        """Add an engine, for all routers of the store; raises AlreadyKnown, or StoreDown: it was
        not acknowledged.
        """
        wanted = Wanted(role, target, added=secrets.token_hex(8))
        for member in self._registry.members():
            if _key(member) == wanted.key and not member.retires:
                raise AlreadyKnown(
                    f"{target.address.authority} is already known as {member.instance.id}"
                )
        if wanted.key in self._reconciler.assignments:  # of an engine that was there before
            await self._store.delete(assignment_name(wanted.key))
        await self._store.put(entry_name(wanted.key), entry_of(wanted))

    async def remove(self, name: InstanceId) -> None:
        """Take an engine out; with a rank that is in the store go the other ranks at its address.

        Raises:
            UnknownInstance: there is none of this id, or another one has been added at its address
                since.
            NotManagedHere: its pod is still there.
            StoreDown: the store has not acknowledged it.
        """
        member = self._registry.member(name)
        if member.origin.source is EngineSource.PODS:
            raise NotManagedHere(
                f"{name} is a pod, and would be back at once: drain it, or delete the pod"
            )
        await self._rewrite(member, lambda _: None)
        if _key(member) in self._reconciler.assignments:
            await self._store.delete(assignment_name(_key(member)))
        if self._registry.get(name) is member and member.origin.wanted is None:
            self._registry.remove(name, now=self._reconciler.clock())

    async def drain(self, name: InstanceId, *, moves: bool = False) -> None:
        """Send it nothing new: no router of the store does, if it was added there; else this one.

        Raises as remove.

        ``moves``: its streams go on at other engines.
        """
        await self._leave(name, leaves=True, moves=moves)
        if self._registry.get(name) is not None:
            self._registry.departures.drain(name, now=self._reconciler.clock(), moves=moves)

    def is_drain_shared(self, member: Member) -> bool:
        """Tell whether the other routers of the store know of its drain, too."""
        wanted = member.origin.wanted
        return _has_entry(member) or member.retires or (wanted is not None and wanted.leaves)

    async def undrain(self, name: InstanceId) -> None:
        """Send it requests again, and end a turn that is under way, for all routers of the store.

        Raises as remove, and AlreadyKnown: its address has been added anew.
        """
        member = self._registry.member(name)
        if member.turn is not None:
            await self._assign(member, member.role)
        await self._leave(name, leaves=False)
        self._registry.departures.undrain(name, now=self._reconciler.clock())

    async def turn(self, name: InstanceId, to: EngineRole, *, force: bool = False) -> None:
        """Have an engine serve another role, at all routers of the store, as soon as nothing of the
        old one is left.

        A turn to what it serves ends the one that is under way. This returns when it has begun: the
        registry's member tells how it goes on.

        Raises:
            UnknownInstance: there is none of this id.
            CannotTurn: it cannot, or is the last one that serves the role that it leaves, and
                ``force`` is not set.
            StoreDown: the store has not acknowledged it.
        """
        self._registry.departures.check_turn(name, to, force=force)
        await self._forget_assignments()
        member = self._registry.member(name)
        before = member.role
        heading = member.heading
        await self._assign(member, to)
        if force or heading is to or self._registry.get(name) is not member:
            return
        try:
            # Others may have asked for another one at the same moment.
            self._registry.departures.check_begun(name, before, to)
        except CannotTurn:
            if self._reconciler.role_of(member) is to:
                await self._assign(member, heading)
            raise

    async def _assign(self, member: Member, role: EngineRole) -> None:
        key = _key(member)
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
        for key in self._reconciler.of_gone_pods():
            await self._store.delete(assignment_name(key))

    async def _leave(self, name: InstanceId, *, leaves: bool, moves: bool = False) -> None:
        member = self._registry.member(name)
        if not _has_entry(member):
            return  # nothing that the other routers would know it by
        await self._rewrite(
            member, lambda now: replace(now, leaves=leaves, moves=leaves and (moves or now.moves))
        )

    async def _rewrite(self, member: Member, change: Callable[[Wanted], Wanted | None]) -> None:
        """Change the entry of an engine, or drop it (None), if it is still there.

        Raises UnknownInstance: another engine has been added at its address since, by way of
        another router.
        """
        key = _key(member)
        own = member.origin.wanted
        entry = entry_name(key)
        for _ in range(_TRIES):  # others may change it at the same moment
            text = self._entries.text(entry)
            now = None if text is None else _entry(text)
            if text is None or not isinstance(now, Wanted):
                return
            if own is not None and own.added and now.added and own.added != now.added:
                raise UnknownInstance(
                    f"{member.instance.id} is gone: another engine has been added at its address"
                )
            wanted = change(now)
            if wanted == now or await self._store.replace(
                entry, text, None if wanted is None else entry_of(wanted)
            ):
                return
        raise StoreDown(
            f"others have changed what the store has of {member.instance.id} {_TRIES} times "
            f"meanwhile"
        )

    async def _reconcile(self) -> None:
        for _ in self._reconciler.reconcile():
            await asyncio.sleep(0)
        now = self._reconciler.clock()
        if now >= self._looked_at + _ASSIGNMENTS_S:
            self._looked_at = now
            await self.look_at_assignments()

    async def look_at_assignments(self) -> None:
        """Forget what engines serve that no router of the store names any more."""
        reconciler = self._reconciler
        looked = self._unnamed.look(
            reconciler.assignments, reconciler.is_named, now=reconciler.clock()
        )
        try:
            for before, after in looked:
                if reconciler.assignments.get(before.key) != before:
                    continue  # it was turned, or spoken for, while others were written
                name = assignment_name(before.key)
                if after is not None:
                    await self._store.put(name, assignment_of(after))
                    self._unnamed.written(after, now=reconciler.clock())
                else:
                    await self._store.delete(name)
                    said = (
                        "no router knows a %s engine at %s any more: it is forgotten that it "
                        "serves %s"
                    )
                    logger.info(said, before.key.role, before.key.authority, before.serves)
        except StoreDown as exc:  # the next look tries again
            logger.warning("what engines serve that are gone is not forgotten yet: %s", exc)


def _has_entry(member: Member) -> bool:
    """Tell whether the store has an entry of this engine alone."""
    wanted = member.origin.wanted
    return (
        wanted is not None
        and member.origin.source is EngineSource.STORE
        and len(wanted.target.ranks) <= 1
    )


def _key(member: Member) -> Key:
    return Key(member.instance.pool, member.instance.address.authority)


def _entry(text: str) -> Wanted | Assignment | AddressError:
    try:
        return read_entry(text)
    except AddressError as exc:
        return exc
