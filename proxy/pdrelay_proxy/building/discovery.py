"""Builds discovery: the pods of a cluster, and the store of engines that operators add."""

import os
from collections.abc import Callable, Sequence

from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.core.ports import SharedText
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.discovery.kubernetes import Cluster, Kubernetes
from pdrelay_proxy.io.discovery.reconciler import Discovery, EngineFeed, Entries, Reconciler
from pdrelay_proxy.io.discovery.shared_texts import FileText, LeaseText, MemoryText
from pdrelay_proxy.io.discovery.stores import Store, StoreObserver
from pdrelay_proxy.io.discovery.stores.configmap import ConfigMapStore
from pdrelay_proxy.io.discovery.stores.file import FileStore
from pdrelay_proxy.io.discovery.stores.memory import MemoryStore
from pdrelay_proxy.settings import Settings


def build_discovery(
    settings: Settings,
    registry: Registry,
    clock: Callable[[], float],
    feeds: Sequence[EngineFeed] = (),
) -> Discovery:
    """Build the sources of the settings; ``feeds``: other sources of engines.

    Raises ConfigError: a dependency of the store or of a feed is missing.
    """
    pods = [EngineSource.PODS] if feeds else []
    reconciler = Reconciler(registry, [EngineSource.STORE, *pods], clock)
    entries = Entries(reconciler)
    store = _store(settings, entries, clock)
    return Discovery(
        registry, reconciler, entries, store, feeds=[feed(reconciler) for feed in feeds]
    )


def build_shared_text(settings: Settings, name: str, *, lasts_s: float) -> SharedText:
    """Return a text beside the store's engines; raises ConfigError: a dependency of the store is
    missing.

    ``lasts_s``: the duration of the lease in the text.
    """
    kind, _, where = settings.store.partition(":")
    match kind:
        case "memory":
            return MemoryText()
        case "file":
            return FileText(f"{where}.{name}")
        case "kubernetes":
            namespace, config_map = _config_map(where)
            return LeaseText(
                Kubernetes(Cluster.around(namespace)),
                config_map,
                f"pdrelay/{name}",
                lasts_s=lasts_s,
            )
        case _:
            from pdrelay_proxy.io.discovery.stores.redis import RedisText  # noqa: PLC0415 (_store has loaded it)

            return RedisText(
                settings.store, name, password=os.environ.get("PDRELAY_REDIS_PASSWORD")
            )


def _config_map(location: str) -> tuple[str | None, str]:
    """Return the namespace of a store's ConfigMap (None: the router's own) and its name."""
    namespace, _, name = location.rpartition("/")
    return namespace or None, name


def _store(settings: Settings, observer: StoreObserver, clock: Callable[[], float]) -> Store:
    kind, _, where = settings.store.partition(":")
    match kind:
        case "memory":
            return MemoryStore(observer)
        case "file":
            return FileStore(where, observer)
        case "kubernetes":
            namespace, config_map = _config_map(where)
            return ConfigMapStore(
                Kubernetes(Cluster.around(namespace)), config_map, observer, clock=clock
            )
        case _:
            try:
                from pdrelay_proxy.io.discovery.stores.redis import RedisStore  # noqa: PLC0415 (its library is an extra)
            except ImportError as exc:
                raise ConfigError(
                    "the store is Redis, but redis is not installed: pip install 'pdrelay[redis]'"
                ) from exc
            return RedisStore(
                settings.store, observer, password=os.environ.get("PDRELAY_REDIS_PASSWORD")
            )
