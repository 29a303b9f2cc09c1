"""What makes a router one of several workers: everything that is different then, in one place."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.workers.instance_ids import Verb
from pdrelay_proxy.core.workers.reports import Part, Whole
from pdrelay_proxy.core.workers.worker_health import WorkerHealth
from pdrelay_proxy.io.request_path.id_log import InstanceIdLog
from pdrelay_proxy.io.request_path.shared_registry import SharedRegistry
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.workers.context import WorkerContext
from pdrelay_proxy.io.workers.health_gossip import HealthGossip
from pdrelay_proxy.io.workers.reports import WorkerReports, report_of
from pdrelay_proxy.settings import Settings


class SingleWorker:
    """A router of one process."""

    def __init__(self, settings: Settings) -> None:
        self.number, self.of = 0, 1
        self.registry = Registry(settings)

    def stored(self, settings: Settings) -> Settings:
        """Return them as they are."""
        return settings

    def tell(self, _verb: Verb, _name: InstanceId, /) -> None:
        """There are no others."""

    def follow(self) -> None:
        """There are no others."""

    def is_drained(self, _name: InstanceId, /) -> bool:
        """There are no others."""
        return True

    def everybody(
        self, telemetry: Telemetry, queue: Admission, _part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole]]:
        """Ask nobody: this one's numbers are all there are."""

        async def whole() -> Whole:
            return Whole(report_of(telemetry, queue), (), 1)

        return whole

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Nothing."""
        return ()


class GroupedWorker:
    """One worker of several."""

    def __init__(self, place: WorkerContext, settings: Settings, clock: Callable[[], float]) -> None:
        self.number, self.of = place.number, place.of
        self._place = place
        self._clock = clock
        ledger = InstanceIdLog(place.path / "ledger")
        self.registry = SharedRegistry(settings, ledger, counts=place.number == 0)
        self.tell = ledger.say  # what an operator has ordered here, for the others
        peers = WorkerHealth(self.registry)
        self.is_drained = self.registry.is_drained_elsewhere = peers.is_drained
        self._running = [HealthGossip(place, self.registry, peers, clock).running]

    def follow(self) -> None:
        """Know what the others have written by now: an order names an engine by its id."""
        self.registry.follow(now=self._clock())

    def stored(self, settings: Settings) -> Settings:
        """Return the settings with a store in the folder of the workers, if they have none that is shared."""
        if settings.store != "memory":
            return settings
        return replace(settings, store=f"file:{self._place.path / 'engines'}")

    def everybody(
        self, telemetry: Telemetry, queue: Admission, part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole]]:
        """Return what asks the others; from now on they can ask this one."""
        reports = WorkerReports(self._place, telemetry, queue, part)
        self._running.append(reports.running)
        return reports.whole

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Return the exchange, and the answering."""
        return [part() for part in self._running]


WorkerGroup: TypeAlias = SingleWorker | GroupedWorker


def worker_group(place: WorkerContext | None, settings: Settings, clock: Callable[[], float]) -> WorkerGroup:
    """Return that of a worker, or of a router of one process; ``clock``: the registry's."""
    return SingleWorker(settings) if place is None else GroupedWorker(place, settings, clock)
