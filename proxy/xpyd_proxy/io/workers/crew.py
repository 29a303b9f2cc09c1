"""What makes a router one of several workers: everything that is different then, in one place."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from xpyd_proxy.core.fleet.health import Limits
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import InstanceId
from xpyd_proxy.core.ports import Queue
from xpyd_proxy.core.workers.reports import Part, Whole
from xpyd_proxy.core.workers.worker_health import Peers
from xpyd_proxy.io.request_path.shared_registry import SharedRegistry
from xpyd_proxy.io.sight import Sight
from xpyd_proxy.io.workers.changes import Changes, Together
from xpyd_proxy.io.workers.exchange import Exchange
from xpyd_proxy.io.workers.ledger import Ledger
from xpyd_proxy.io.workers.place import Place
from xpyd_proxy.io.workers.reports import Reports
from xpyd_proxy.settings import Settings


class Company(Protocol):
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

    def changes(self, here: Changes) -> Changes:
        """Return what carries a change out in all of them."""
        ...

    def is_drained(self, name: InstanceId, /) -> bool:
        """Tell whether an engine is drained for all the others."""
        ...

    def everybody(
        self, sight: Sight, queue: Queue, part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole | None]]:
        """Return what asks all of them for their numbers; None: this one's are all there are."""
        ...

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Return what runs as long as this one serves."""
        ...


class Alone:
    """A router of one process."""

    def __init__(self, limits: Limits) -> None:
        self.number, self.of = 0, 1
        self.registry = Registry(limits)

    def stored(self, settings: Settings) -> Settings:
        """Return them as they are."""
        return settings

    def changes(self, here: Changes) -> Changes:
        """Return what makes them here."""
        return here

    def is_drained(self, _name: InstanceId, /) -> bool:
        """There are no others."""
        return True

    def everybody(
        self, _sight: Sight, _queue: Queue, _part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole | None]]:
        """Ask nobody."""
        return nobody

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Nothing."""
        return ()


async def nobody() -> Whole | None:
    """There are no other workers."""
    return None


class Crew:
    """One worker of several."""

    def __init__(self, place: Place, limits: Limits, clock: Callable[[], float]) -> None:
        self.number, self.of = place.number, place.of
        self._place = place
        self._ledger = Ledger(place.path / "ledger")
        self.registry = SharedRegistry(limits, self._ledger)
        self._peers = Peers(self.registry)
        self._running = [Exchange(place, self.registry, self._peers, clock).running]

    def stored(self, settings: Settings) -> Settings:
        """Return the settings with a store in the folder of the workers, if they have none that is shared."""
        if settings.store != "memory":
            return settings
        return replace(settings, store=f"file:{self._place.path / 'engines'}")

    def changes(self, here: Changes) -> Changes:
        """Return what makes a change here, and tells the others."""
        return Together(here, self.registry, self._ledger)

    def is_drained(self, name: InstanceId, /) -> bool:
        """Tell whether the others say so."""
        return self._peers.is_drained(name)

    def everybody(
        self, sight: Sight, queue: Queue, part: Callable[[], Part], /
    ) -> Callable[[], Awaitable[Whole | None]]:
        """Return what asks the others; from now on they can ask this one."""
        reports = Reports(self._place, sight, queue, part)
        self._running.append(reports.running)
        return reports.whole

    def running(self) -> Sequence[AbstractAsyncContextManager[object]]:
        """Return the exchange, and the answering."""
        return [part() for part in self._running]


def company(place: Place | None, limits: Limits, clock: Callable[[], float]) -> Company:
    """Return that of a worker, or of a router of one process; ``clock``: the registry's."""
    return Alone(limits) if place is None else Crew(place, limits, clock)
