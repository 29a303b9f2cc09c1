"""The roll of the engines: who is there and in what state, for those who only look."""

from collections.abc import Sequence

from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.ports import InstanceStatus


class InstanceStates:
    """The census of a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def states(self) -> Sequence[str]:
        """Return every word that a state can be: those of the table of an engine's life."""
        return tuple(HealthState)

    def standings(self) -> Sequence[InstanceStatus]:
        """List the engines, in the order they were added."""
        members = self._registry.members()
        return [InstanceStatus(member.instance, member.life.state, member.life.why) for member in members]
