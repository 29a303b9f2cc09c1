"""Which engines have said that they have no such path: a chat model has no embeddings, and each
asking costs a leg.

It is forgotten when an engine restarts or changes what it is, and after a while: a mesh in front of
engines may say so, too, while its routes are made. For as long an engine that has served a path is
not believed that it lacks it: then it is the mesh, or the one client who asks for what is not
there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import LEAVING
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.errors import PathNotServed

HOLDS_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Evidence:
    """An engine has said it, or shown that it has the path, as what it was then."""

    at: float
    cache_since: float
    facts: EngineCapabilities


class MissingPaths:
    """Times are seconds of the fleet's clock."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # By path: there are as many as clients can reach. What is not in the first one no engine
        # lacks: nearly all.
        self.denials: dict[str, dict[InstanceId, _Evidence]] = {}
        self._served: dict[str, dict[InstanceId, _Evidence]] = {}

    def denied(self, path: str, name: InstanceId, *, now: float) -> None:
        """An engine has said that it has no such path."""
        member = self._registry.get(name)
        if member is not None and not self._is_known(self._served.get(path), member, now):
            self._note(self.denials, path, member, now)

    def served(self, path: str, name: InstanceId, *, now: float) -> None:
        """An engine has given a good answer for a path, or the beginning of one."""
        member = self._registry.get(name)
        if member is not None:
            self._note(self._served, path, member, now)

    def _note(
        self, kept: dict[str, dict[InstanceId, _Evidence]], path: str, member: Member, now: float
    ) -> None:
        name = member.instance.id
        by_engine = kept.setdefault(path, {})
        if name not in by_engine:
            for gone in [engine for engine in by_engine if self._registry.get(engine) is None]:
                del by_engine[gone]
        by_engine[name] = _Evidence(now, member.life.cache_since, member.facts)

    def offering(self, path: str, among: Sequence[Instance], *, now: float) -> Sequence[Instance]:
        """Leave out the engines that have no such path."""
        denials = self.denials.get(path)
        if denials is None:
            return among
        members = [(instance, self._registry.get(instance.id)) for instance in among]
        return [
            instance
            for instance, member in members
            if member is None or not self._is_known(denials, member, now)
        ]

    def check(self, path: str, hints: RoutingHints, *, now: float) -> None:
        """Accept a path that an engine may have, of those that decode and serve the model.

        Raises:
            PathNotServed: each has said that it has no such path.
        """
        denials = self.denials.get(path)
        if denials is None:
            return
        serving = [
            member
            for member in self._registry.members()
            if member.role.serves(Role.DECODE)
            and member.life.state not in LEAVING
            and member.facts.serves(hints.model)
        ]
        if serving and all(self._is_known(denials, member, now) for member in serving):
            raise PathNotServed(f"no engine here that serves the model has {path}")
        if not any(self._is_known(denials, member, now) for member in self._registry.members()):
            del self.denials[path]

    def _is_known(
        self, kept: dict[InstanceId, _Evidence] | None, member: Member, now: float
    ) -> bool:
        """Tell whether the evidence on an engine still holds."""
        evidence = None if kept is None else kept.get(member.instance.id)
        if evidence is None or now >= evidence.at + HOLDS_S:
            return False
        return member.life.cache_since == evidence.cache_since and member.facts == evidence.facts
