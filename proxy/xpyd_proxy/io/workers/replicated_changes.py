"""What an operator may change: where all routers of a store see it, and in all workers of this router."""

from typing import Protocol

from xpyd_proxy.core.fleet.origin import EngineSource
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.model import InstanceId, Role
from xpyd_proxy.core.workers.instance_ids import Verb
from xpyd_proxy.io.workers.id_log import InstanceIdLog


class FleetChanges(Protocol):
    """Carries changes out; what it raises is written at :class:`xpyd_proxy.io.discovery.reconciler.Discovery`."""

    async def add(self, role: Role, target: Target) -> None:
        """Add an engine."""
        ...

    async def remove(self, name: InstanceId) -> None:
        """Take an engine out."""
        ...

    async def drain(self, name: InstanceId) -> None:
        """Send it nothing new."""
        ...

    async def undrain(self, name: InstanceId) -> None:
        """Send it requests again."""
        ...


class ReplicatedChanges:
    """Makes a change here, and writes into the ledger what no store carries to the other workers."""

    def __init__(self, here: FleetChanges, registry: Registry, ledger: InstanceIdLog) -> None:
        self._here = here
        self._registry = registry
        self._ledger = ledger

    async def add(self, role: Role, target: Target) -> None:
        """Add an engine: the store carries it. Raises as Discovery does."""
        await self._here.add(role, target)

    async def remove(self, name: InstanceId) -> None:
        """Take an engine out. Raises as Discovery does."""
        is_static = self._registry.member(name).origin.source is EngineSource.STATIC
        await self._here.remove(name)
        if is_static and self._registry.get(name) is None:
            self._ledger.say(Verb.REMOVE, name)

    async def drain(self, name: InstanceId) -> None:
        """Send it nothing new. Raises as Discovery does."""
        await self._here.drain(name)
        self._ledger.say(Verb.DRAIN, name)

    async def undrain(self, name: InstanceId) -> None:
        """Send it requests again. Raises as Discovery does."""
        await self._here.undrain(name)
        self._ledger.say(Verb.UNDRAIN, name)
