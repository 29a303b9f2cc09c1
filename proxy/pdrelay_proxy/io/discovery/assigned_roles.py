"""The roles that operators assigned to engines, in place of those that sources name."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final

from pdrelay_proxy.core.discovery.sources import Sources, key_of
from pdrelay_proxy.core.discovery.store_entries import Assignment
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Key
from pdrelay_proxy.core.model import EngineRole
from pdrelay_proxy.core.steps import portions

logger = logging.getLogger(__name__)
# a source that was silent for longer may be out of date; a watch that works is heard sooner
_FRESH_S: Final = 90.0
_AT_ONCE: Final = 20  # engines whose roles are compared in one step


class AssignedRoles:
    """Has engines serve the roles that the store assigns to them."""

    def __init__(self, registry: Registry, sources: Sources, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._sources = sources
        self._clock = clock  # seconds; the registry's clock
        # of engines that changed their role, or will
        self.assignments: Mapping[Key, Assignment] = {}
        self._begins = True  # this router has just started: the store has not been heard

    def receive_in_steps(
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
            for members in portions(self._registry.members(), _AT_ONCE):
                self.change(members)
                yield
        yield from view
        if not self._begins:
            changed = [
                key for key in {**before, **assignments} if before.get(key) != assignments.get(key)
            ]
            for keys in portions(changed, _AT_ONCE):
                self.change(self._registry.members_at(keys))
                yield
        self._begins = False

    def change(self, members: Sequence[Member]) -> None:
        """Start the role changes that are assigned to engines; those that are gone are left out."""
        for member in members:
            role = self.role_of(member)
            is_known = self._registry.get(member.instance.id) is member
            if is_known and member.heading is not role:
                self._change_role(member, role, at_once=self._begins)

    def begin(self, member: Member) -> None:
        """Have an engine that was just added serve its role at once."""
        role = self.role_of(member)
        if member.heading is not role:
            self._change_role(member, role, at_once=True)

    def role_of(self, member: Member) -> EngineRole:
        """Return the role that an engine should serve."""
        assignment = self.assignments.get(key_of(member))
        wanted = member.origin.wanted
        if assignment is None or not assignment.means("" if wanted is None else wanted.identity):
            return EngineRole(member.instance.pool.value) if wanted is None else wanted.serves
        return assignment.serves

    def of_gone_pods(self) -> Sequence[Key]:
        """List the assignments of pods that are gone; none while the list of pods is not known.

        A pod that is not Ready is there, even if it is no engine of this router yet.
        """
        pods = self._sources.views.get(EngineSource.PODS)
        if pods is None or self._sources.missing or self._clock() > pods.heard_at + _FRESH_S:
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
        views = self._sources.views
        if assignment.identity and EngineSource.PODS not in views:
            return None
        is_known = all(
            view.is_synced and self._clock() <= view.heard_at + _FRESH_S for view in views.values()
        )
        return False if is_known else None

    def _is_there(self, key: Key, assignment: Assignment) -> bool:
        wanted = [
            view.engines.get(key) or view.left_out.get(key) for view in self._sources.views.values()
        ]
        if any(engine is not None and assignment.means(engine.identity) for engine in wanted):
            return True
        # an engine of the settings
        return any(member.origin.wanted is None for member in self._registry.members_at([key]))

    def _change_role(self, member: Member, role: EngineRole, *, at_once: bool) -> None:
        before = member.turn
        self._registry.departures.change_role(
            member.instance.id, role, now=self._clock(), at_once=at_once
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
