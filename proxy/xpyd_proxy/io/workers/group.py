"""What makes a router one of several workers: everything that is different then, in one place."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from xpyd_proxy.core.fleet.health import HealthLimits
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import InstanceId
from xpyd_proxy.core.ports import Queue
from xpyd_proxy.core.workers.reports import Part, Whole
from xpyd_proxy.core.workers.worker_health import WorkerHealth
from xpyd_proxy.io.request_path.shared_registry import SharedRegistry
from xpyd_proxy.io.request_path.telemetry import Telemetry
from xpyd_proxy.io.workers.context import WorkerContext
from xpyd_proxy.io.workers.health_gossip import HealthGossip
from xpyd_proxy.io.workers.id_log import InstanceIdLog
from xpyd_proxy.io.workers.replicated_changes import FleetChanges, ReplicatedChanges
from xpyd_proxy.io.workers.reports import WorkerReports
from xpyd_proxy.settings import Settings


class WorkerGroup(Protocol):
    """The processes of a router, for one of them."""

    @property
    def number(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def of(self) -> int:
        """How many there are."""
        ...

    @property
    def registry(self) -> Registry:
        """The engines, under the same ids in all of them."""
        ...

    def stored(self, settings: Settings) -> Settings:
        """Return the settings with a store that all of them have."""
        ...

    def changes(self, here: FleetChanges) -> FleetChanges:
        """Return what carries a change out in all of them."""
        ...

    def is_drained(self, name: InstanceId, /) -> bool:
        """Tell whether an engine is drained for all the others."""
        ...

    def everybody(
        self, telemetry: Telemetry, queue: Queue, part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole | None]]:
        """Return what asks all of them for their numbers; None: this one's are all there are."""
        ...

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Return what runs as long as this one serves."""
        ...


class SingleWorker:
    """A router of one process."""

    def __init__(self, limits: HealthLimits) -> None:
        self.number, self.of = 0, 1
        self.registry = Registry(limits)

    def stored(self, settings: Settings) -> Settings:
        """Return them as they are."""
        return settings

    def changes(self, here: FleetChanges) -> FleetChanges:
        """Return what makes them here."""
        return here

    def is_drained(self, _name: InstanceId, /) -> bool:
        """There are no others."""
        return True

    def everybody(
        self, _telemetry: Telemetry, _queue: Queue, _part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole | None]]:
        """Ask no_other_workers."""
        return no_other_workers

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Nothing."""
        return ()


async def no_other_workers() -> Whole | None:
    """There are no other workers."""
    return None


class GroupedWorker:
    """One worker of several."""

    def __init__(self, place: WorkerContext, limits: HealthLimits, clock: Callable[[], float]) -> None:
        self.number, self.of = place.number, place.of
        self._place = place
        self._ledger = InstanceIdLog(place.path / "ledger")
        self.registry = SharedRegistry(limits, self._ledger)
        self._peers = WorkerHealth(self.registry)
        self._running = [HealthGossip(place, self.registry, self._peers, clock).running]

    def stored(self, settings: Settings) -> Settings:
        """Return the settings with a store in the folder of the workers, if they have none that is shared."""
        if settings.store != "memory":
            return settings
        return replace(settings, store=f"file:{self._place.path / 'engines'}")

    def changes(self, here: FleetChanges) -> FleetChanges:
        """Return what makes a change here, and tells the others."""
        return ReplicatedChanges(here, self.registry, self._ledger)

    def is_drained(self, name: InstanceId, /) -> bool:
        """Tell whether the others say so."""
        return self._peers.is_drained(name)

    def everybody(
        self, telemetry: Telemetry, queue: Queue, part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole | None]]:
        """Return what asks the others; from now on they can ask this one."""
        reports = WorkerReports(self._place, telemetry, queue, part)
        self._running.append(reports.running)
        return reports.whole

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Return the exchange, and the answering."""
        return [part() for part in self._running]


def worker_group(place: WorkerContext | None, limits: HealthLimits, clock: Callable[[], float]) -> WorkerGroup:
    """Return that of a worker, or of a router of one process; ``clock``: the registry's."""
    return SingleWorker(limits) if place is None else GroupedWorker(place, limits, clock)
