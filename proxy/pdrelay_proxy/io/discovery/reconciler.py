"""Makes the registry match its sources of engines, and carries out the changes of operators."""

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
from pdrelay_proxy.io.discovery.store import Store, StoreDown

logger = logging.getLogger(__name__)
# a source that was silent for longer may be out of date; a watch that works is heard sooner
_FRESH_S: Final = 90.0
# seconds between two checks for assignments of engines that are gone
_ASSIGNMENTS_S: Final = 5.0
_AT_ONCE: Final = 20  # addresses compared in one step
_READ_AT_ONCE: Final = 200  # objects sorted in one step: less than a millisecond
_TEXTS_AT_ONCE: Final = 50  # entries parsed in one step
_TRIES: Final = 5  # to change an entry that other routers change, too
_TICK_S: Final = (
    1.0  # seconds between two comparisons without a reason: a retired engine may have made room
)


class NotManagedHere(Exception):
    """The operator's request is another system's to decide; the message says whose, and what can be
    done.
    """


class Reconciler:
    """Makes the registry match what its sources say, after each change of a source."""

    def __init__(
        self, registry: Registry, sources: Iterable[EngineSource], clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self.clock = clock  # seconds; the registry's clock
        self.sources = Sources(sources, now=clock())
        self.assignments: Mapping[
            Key, Assignment
        ] = {}  # of engines that changed their role, or will
        self._begins = True  # this router has just started: the store has not been heard
        # generations of the registry and of the views at the last comparison
        self._compared = -1, -1
        self._full = set[EngineSource]()  # sources that name more engines than a router takes

    def view(self, source: EngineSource, engines: Iterable[Wanted]) -> None:
        """Take in a whole view of a source."""
        finish(self.view_in_steps(source, engines))

    def view_in_steps(self, source: EngineSource, engines: Iterable[Wanted]) -> Generator[None]:
        """Take in a whole view in steps, between which requests are served.

        The source counts as heard after the last step.
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
        """Take in what a source says of some addresses; the others are not compared.

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
            text = "%s: there are more than %d engines: %d left out until others have gone"
            logger.error(text, source, len(view.engines), len(view.left_out))

    def heard(self, source: EngineSource) -> None:
        """Note that the latest view of a source is still right."""
        self.sources.heard(source, now=self.clock())

    def freshness(self) -> Sequence[Freshness]:
        """Return for each source how recent its view is."""
        return self.sources.freshness(now=self.clock())

    def reconcile(self) -> Generator[None]:
        """Compare everything, if anything may have changed since: a retired engine may have made
        room.

        In steps of some addresses, between which requests are served: a comparison of thousands of
        engines takes longer than a request may wait.
        """
        changes = (
            self._registry.lineup.count,
            sum(view.generation for view in self.sources.views.values()),
        )
        if self._compared == changes:
            return
        seen = set[Key]()
        members = self._registry.members()
        # first, because an engine that goes makes room for another
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
        self._compared = changes  # later changes are compared the next time

    def _compare(self, keys: Iterable[Key]) -> None:
        """Compare the wanted engines at some addresses with the present ones, and carry out the
        difference.
        """
        present = self._registry.members_at(keys)
        self._carry_out(self.sources.desired_at(keys), present)
        if EngineSource.STORE not in self.sources.missing:  # until then roles are not known
            self._change_roles([member for member in present if self._is_known(member)])

    def assign_in_steps(
        self, assignments: Mapping[Key, Assignment], view: Generator[None]
    ) -> Generator[None]:
        """Take in the roles that operators assigned to engines, then a view of the store, in its
        steps.

        A router that has just started has no requests at engines whose role was changed: they serve
        the assigned role at once, before the store counts as heard, which lets requests in.
        """
        before = self.assignments
        self.assignments = assignments
        if self._begins:
            # engines that come with the view serve their role from the beginning
            members = self._registry.members()
            for begin in range(0, len(members), _AT_ONCE):
                self._change_roles(
                    [
                        member
                        for member in members[begin : begin + _AT_ONCE]
                        if self._is_known(member)
                    ]
                )
                yield
        yield from view
        if not self._begins:
            changed = [
                key for key in {**before, **assignments} if before.get(key) != assignments.get(key)
            ]
            for begin in range(0, len(changed), _AT_ONCE):
                self._change_roles(self._registry.members_at(changed[begin : begin + _AT_ONCE]))
                yield
        self._begins = False

    def _is_known(self, member: Member) -> bool:
        return self._registry.get(member.instance.id) is member

    def role_of(self, member: Member) -> EngineRole:
        """Return the role that an engine should serve."""
        assignment = self.assignments.get(_key(member))
        wanted = member.origin.wanted
        if assignment is None or not assignment.means("" if wanted is None else wanted.identity):
            return EngineRole(member.instance.pool.value) if wanted is None else wanted.serves
        return assignment.serves

    def assignments_of_gone_pods(self) -> Sequence[Key]:
        """List the assignments of pods that are gone; none while the list of pods is not known.

        A pod that is not Ready is there, even if it is no engine of this router yet.
        """
        pods = self.sources.views.get(EngineSource.PODS)
        if pods is None or self.sources.missing or self.clock() > pods.heard + _FRESH_S:
            return ()
        return [
            key
            for key, assignment in self.assignments.items()
            if assignment.identity and not self._is_there(key, assignment)
        ]

    def is_named(self, assignment: Assignment) -> bool | None:
        """Return whether a source of this router names the engine of an assignment; None: not known
        now.

        An engine that left the settings counts as named until its last request is over. Only a
        router that watches pods knows whether a pod is there.
        """
        if self._is_there(assignment.key, assignment):
            return True
        views = self.sources.views
        if assignment.identity and EngineSource.PODS not in views:
            return None
        is_known = all(
            view.is_synced and self.clock() <= view.heard + _FRESH_S for view in views.values()
        )
        return False if is_known else None

    def _is_there(self, key: Key, assignment: Assignment) -> bool:
        wanted = [
            view.engines.get(key) or view.left_out.get(key) for view in self.sources.views.values()
        ]
        if any(engine is not None and assignment.means(engine.identity) for engine in wanted):
            return True
        # an engine of the settings
        return any(member.origin.wanted is None for member in self._registry.members_at([key]))

    def _change_roles(self, members: Sequence[Member]) -> None:
        """Start the role changes that assignments ask for."""
        for member in members:
            role = self.role_of(member)
            if member.heading is not role:
                self._change_role(member, role, at_once=self._begins)

    def _change_role(self, member: Member, role: EngineRole, *, at_once: bool) -> None:
        before = member.turn
        self._registry.departures.change_role(
            member.instance.id, role, now=self.clock(), at_once=at_once
        )
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
                    self._change_role(member, role, at_once=True)

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
    """Takes in the objects of a source: engines, and objects that cannot be read as one.

    The source is the watch of pods, or the store.
    """

    def __init__(self, reconciler: Reconciler, source: EngineSource = EngineSource.PODS) -> None:
        self._reconciler = reconciler
        self._source = source
        self._logged_errors: set[str] = set()
        self._objects: dict[str, Wanted | AddressError | None] = {}
        # engines by address, then by object: two objects may claim one address
        self._named: dict[Key, dict[str, Wanted]] = {}

    def view(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take in all objects."""
        finish(self.view_in_steps(objects))

    def view_in_steps(
        self, objects: Mapping[str, Wanted | AddressError | None], /
    ) -> Generator[None]:
        """Take in all objects, in steps; ``changed`` must wait until they are done."""
        errors = set[str]()
        named = dict[Key, dict[str, Wanted]]()
        for number, (name, item) in enumerate(objects.items(), start=1):
            if isinstance(item, Wanted):
                named.setdefault(item.key, {})[name] = item
            elif isinstance(item, AddressError):
                errors.add(str(item))
            if number % _READ_AT_ONCE == 0:
                yield
        for text in sorted(errors - self._logged_errors):
            logger.warning("left out: %s", text)
        self._logged_errors = errors
        self._objects = dict(objects)
        self._named = named
        yield from self._reconciler.view_in_steps(
            self._source, (item for item in objects.values() if isinstance(item, Wanted))
        )

    async def receive(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take in all objects; other tasks run between the steps.

        One view at a time, and ``changed`` waits for it.
        """
        for _ in self.view_in_steps(objects):
            await asyncio.sleep(0)

    def changed(self, objects: Mapping[str, Wanted | AddressError | None], /) -> None:
        """Take in some objects that have changed; None: the object is gone, or no engine.

        The others are as they were.
        """
        finish(self.changed_in_steps(objects))

    def changed_in_steps(
        self, objects: Mapping[str, Wanted | AddressError | None]
    ) -> Generator[None]:
        """Take in changed objects in steps, first the addresses that lost their engine: they make
        room.
        """
        keys = dict[Key, None]()
        for number, (name, new) in enumerate(objects.items(), start=1):
            old = self._objects.pop(name, None)
            if isinstance(old, Wanted):
                keys[old.key] = None
                self._named[old.key].pop(name, None)
            elif isinstance(old, AddressError):
                self._logged_errors.discard(str(old))
            if new is not None:
                self._objects[name] = new
            if isinstance(new, Wanted):
                keys[new.key] = None
                self._named.setdefault(new.key, {})[name] = new
            elif isinstance(new, AddressError) and str(new) not in self._logged_errors:
                self._logged_errors.add(str(new))
                logger.warning("left out: %s", new)
            if number % _READ_AT_ONCE == 0:
                yield
        order = sorted(keys, key=lambda key: bool(self._named.get(key)))
        # also if no address changed: the source was heard
        for begin in range(0, len(order), _AT_ONCE) or (0,):
            self._reconciler.change(
                self._source, {key: self._at(key) for key in order[begin : begin + _AT_ONCE]}
            )
            yield

    def heard(self) -> None:
        """Note that the latest view is still right."""
        self._reconciler.heard(self._source)

    def _at(self, key: Key) -> Wanted | None:
        """Return the engine of an address. If two objects claim it: one that does not leave, else
        the latest.
        """
        named = self._named.get(key)
        if not named:
            self._named.pop(key, None)
            return None
        return sorted(named.values(), key=lambda engine: not engine.leaves)[-1]


class Entries:
    """Takes in the store's texts, which people may have edited."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self._view = Pods(reconciler, EngineSource.STORE)
        self._texts: Mapping[str, str] = {}  # by name, of the latest view
        self._assignments: dict[str, Assignment] = {}  # by name, of the latest view
        self._waiting: Mapping[str, str] | None = None  # the latest view, until it is taken in
        self._lock = asyncio.Lock()
        self.heard = self._view.heard

    def text(self, name: str) -> str | None:
        """Return an entry of the latest view; None: there is none."""
        return self._texts.get(name)

    async def receive(self, entries: Mapping[str, str], /) -> None:
        """Take in all entries, or those of a later view, after the view that is being taken in.

        Other tasks run in between.
        """
        self._waiting = entries
        async with self._lock:
            while (latest := self._waiting) is not None:
                self._waiting = None
                steps = self.view_in_steps(latest)
                try:
                    for _ in steps:
                        await asyncio.sleep(0)
                finally:
                    # if the task is cancelled, finish the view: the store would not send it again
                    finish(steps)

    def view(self, entries: Mapping[str, str]) -> None:
        """Take in all entries at once."""
        finish(self.view_in_steps(entries))

    def view_in_steps(self, entries: Mapping[str, str]) -> Generator[None]:
        """Take in all entries in steps. Of what may be thousands, only changed ones are parsed."""
        before = self._texts
        self._texts = dict(entries)
        engines = dict[str, Wanted | AddressError | None]()
        for name in before:
            if name not in entries:
                engines[name] = None
                self._assignments.pop(name, None)
        changed = [(name, text) for name, text in entries.items() if before.get(name) != text]
        for number, (name, text) in enumerate(changed, start=1):
            entry = _entry(text)
            self._assignments.pop(name, None)
            if isinstance(entry, Assignment):
                engines[name] = None
                self._assignments[name] = entry
            else:
                engines[name] = (
                    entry
                    if isinstance(entry, Wanted)
                    else AddressError(f"entry {shown_name(name)}: {entry}")
                )
            if number % _TEXTS_AT_ONCE == 0:
                yield
        is_first = EngineSource.STORE in self._reconciler.sources.missing
        view = (
            self._view.view_in_steps(engines) if is_first else self._view.changed_in_steps(engines)
        )
        assignments = [self._assignments[name] for name in entries if name in self._assignments]
        yield from self._reconciler.assign_in_steps(
            {entry.key: entry for entry in assignments}, view
        )


# A source of engines for a reconciler: returns the context that runs while the router serves.
# Raises ConfigError.
EngineFeed: TypeAlias = Callable[[Reconciler], Running]


class Discovery:
    """All sources while they run, and the changes that operators may make.

    A change is written to the store, where all routers see it.
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
        self._entries = entries  # the store's observer
        self._store = store
        self._feeds = feeds
        self._unnamed = UnnamedAssignments()
        self._assignments_checked_at = reconciler.clock()  # seconds
        self.freshness = reconciler.freshness

    @property
    def missing(self) -> Sequence[EngineSource]:
        """The sources that have not been heard yet."""
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
        """Add an engine for all routers of the store.

        Raises AlreadyKnown, or StoreDown: the store has not acknowledged it.
        """
        wanted = Wanted(role, target, added=secrets.token_hex(8))
        for member in self._registry.members():
            if _key(member) == wanted.key and not member.retires:
                raise AlreadyKnown(
                    f"{target.address.authority} is already known as {member.instance.id}"
                )
        if wanted.key in self._reconciler.assignments:  # of an earlier engine at this address
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
        if _key(member) in self._reconciler.assignments:
            await self._store.delete(assignment_name(_key(member)))
        if self._registry.get(name) is member and member.origin.wanted is None:
            self._registry.remove(name, now=self._reconciler.clock())

    async def drain(self, name: InstanceId, *, moves: bool = False) -> None:
        """Send an engine nothing new: at all routers of the store if it has an entry there, else at
        this one.

        ``moves``: its streams go on at other engines. Raises as remove.
        """
        await self._leave(name, leaves=True, moves=moves)
        if self._registry.get(name) is not None:
            self._registry.departures.drain(name, now=self._reconciler.clock(), moves=moves)

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
        self._registry.departures.undrain(name, now=self._reconciler.clock())

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
        for key in self._reconciler.assignments_of_gone_pods():
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
        """Change the entry of an engine, or drop it (None), if it is still there.

        Raises UnknownInstance: another router has added another engine at its address since.
        """
        key = _key(member)
        own = member.origin.wanted
        entry_id = entry_name(key)
        for _ in range(_TRIES):  # other routers may change it at the same moment
            text = self._entries.text(entry_id)
            entry = None if text is None else _entry(text)
            if text is None or not isinstance(entry, Wanted):
                return
            if own is not None and own.added and entry.added and own.added != entry.added:
                raise UnknownInstance(
                    f"{member.instance.id} is gone: another engine has been added at its address"
                )
            wanted = change(entry)
            if wanted == entry or await self._store.replace(
                entry_id, text, None if wanted is None else entry_of(wanted)
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
        if now >= self._assignments_checked_at + _ASSIGNMENTS_S:
            self._assignments_checked_at = now
            await self.drop_unnamed_assignments()

    async def drop_unnamed_assignments(self) -> None:
        """Drop role assignments of engines that no router of the store names any more."""
        reconciler = self._reconciler
        changes = self._unnamed.decide(
            reconciler.assignments, reconciler.is_named, now=reconciler.clock()
        )
        try:
            for before, after in changes:
                if reconciler.assignments.get(before.key) != before:
                    continue  # its role changed, or a source named it, while others were written
                name = assignment_name(before.key)
                if after is not None:
                    await self._store.put(name, assignment_of(after))
                    self._unnamed.written(after, now=reconciler.clock())
                else:
                    await self._store.delete(name)
                    text = (
                        "no router knows a %s engine at %s any more: it is forgotten that it "
                        "serves %s"
                    )
                    logger.info(text, before.key.role, before.key.authority, before.serves)
        except StoreDown as exc:  # the next check tries again
            logger.warning("what engines serve that are gone is not forgotten yet: %s", exc)


def _has_entry(member: Member) -> bool:
    """Return whether the store has an entry of this engine alone."""
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
