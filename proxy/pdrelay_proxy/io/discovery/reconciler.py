"""Makes the registry match its sources of engines."""

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from pdrelay_proxy.core.discovery.reconcile import Action, diff
from pdrelay_proxy.core.discovery.sources import Freshness, Sources, key_of
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Origin, Wanted
from pdrelay_proxy.core.steps import portions
from pdrelay_proxy.errors import AlreadyKnown
from pdrelay_proxy.io.background import Running
from pdrelay_proxy.io.discovery.assigned_roles import AssignedRoles

logger = logging.getLogger(__name__)
AT_ONCE: Final = 20  # addresses compared in one step


class Reconciler:
    """Makes the registry match what its sources say, after each change of a source."""

    def __init__(
        self, registry: Registry, sources: Iterable[EngineSource], clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self.clock = clock  # seconds; the registry's clock
        self.sources = Sources(sources, now=clock())
        self.roles = AssignedRoles(registry, self.sources, clock)
        # generations of the registry and of the views at the last comparison
        self._compared = -1, -1
        self._full = set[EngineSource]()  # sources that name more engines than a router takes

    def view_in_steps(self, source: EngineSource, engines: Iterable[Wanted]) -> Generator[None]:
        """Take in a whole view of a source in steps, between which requests are served.

        The source counts as heard after the last step.
        """
        is_first = not self.sources.views[source].is_synced
        for changed in self.sources.replace_in_steps(source, engines, now=self.clock()):
            self._compare(changed)
            yield
        self._log_if_full(source)
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
        self._log_if_full(source)

    def _log_if_full(self, source: EngineSource) -> None:
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
        for instance in self._registry.add_claimed(now=self.clock()):
            logger.info("%s is at %s (settings)", instance.id, instance.address.url)
            self.roles.begin(self._registry.member(instance.id))
        seen = set[Key]()
        # first, because an engine that goes makes room for another
        for members in portions(self._registry.members(), AT_ONCE):
            keys = {key_of(member) for member in members}
            self._compare(keys)
            seen |= keys
            yield
        for view in self.sources.views.values():
            for others in portions([key for key in view.engines if key not in seen], AT_ONCE):
                self._compare(others)
                yield
        self._compared = changes  # later changes are compared the next time

    def _compare(self, keys: Iterable[Key]) -> None:
        """Carry out the difference between the wanted and the present engines at addresses."""
        present = self._registry.members_at(keys)
        self._carry_out(self.sources.desired_at(keys), present)
        if EngineSource.STORE not in self.sources.missing:  # until then roles are not known
            self.roles.change(present)

    def _carry_out(self, desired: Mapping[Key, Origin], present: Sequence[Member]) -> None:
        current = dict[Key, Origin]()
        members = dict[Key, list[Member]]()
        for member in present:
            if not member.retires:
                key = key_of(member)
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
                self.roles.begin(self._registry.member(instance.id))

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


# A source of engines for a reconciler: returns the context that runs while the router serves.
# Raises ConfigError.
EngineFeed: TypeAlias = Callable[[Reconciler], Running]
