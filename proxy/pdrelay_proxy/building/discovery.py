"""Builds discovery: sources of engines, such as the pods of a cluster, and the store of those that
operators add.
"""

from collections.abc import Callable, Sequence

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.io.discovery.discovery import Discovery
from pdrelay_proxy.io.discovery.engine_changes import EngineChanges
from pdrelay_proxy.io.discovery.entries import Entries
from pdrelay_proxy.io.discovery.memory import MemoryStore
from pdrelay_proxy.io.discovery.reconciler import EngineFeed, Reconciler
from pdrelay_proxy.io.discovery.store import SharedStore


def build_discovery(
    shared: SharedStore | None,
    registry: Registry,
    clock: Callable[[], float],
    feeds: Sequence[EngineFeed] = (),
) -> Discovery:
    """Build the sources.

    ``shared``: where this router and others keep engines; ``feeds``: other sources of engines.
    Raises ConfigError: a dependency of the store or of a feed is missing.
    """
    pods = [EngineSource.PODS] if feeds else []
    reconciler = Reconciler(registry, [EngineSource.STORE, *pods], clock)
    entries = Entries(reconciler)
    store = MemoryStore(entries) if shared is None else shared.engines(entries, clock)
    changes = EngineChanges(registry, reconciler, entries, store)
    return Discovery(reconciler, store, changes, feeds=[feed(reconciler) for feed in feeds])
