"""Builds the discovery that the settings ask for."""

import os
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from xpyd_proxy.core.discovery.pods import Meta, Pod, engine_of
from xpyd_proxy.core.fleet.origin import EngineSource, Wanted
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import InstanceId
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.workers.instance_ids import Verb
from xpyd_proxy.errors import AddressError, ConfigError
from xpyd_proxy.io.discovery.kubernetes import Cluster, Kubernetes
from xpyd_proxy.io.discovery.reconciler import Discovery, Entries, Pods, Reconciler
from xpyd_proxy.io.discovery.reflector import Collection, Reflector
from xpyd_proxy.io.discovery.stores import Store, StoreObserver
from xpyd_proxy.io.discovery.stores.configmap import ConfigMapStore
from xpyd_proxy.io.discovery.stores.file import FileStore
from xpyd_proxy.io.discovery.stores.memory import MemoryStore
from xpyd_proxy.settings import Settings


def discovery_of(
    settings: Settings, registry: Registry, clock: Callable[[], float], tell: Callable[[Verb, InstanceId], None]
) -> Discovery:
    """Build it. Raises ConfigError: this is no pod, or what the store needs is not installed."""
    pods = settings.kubernetes_selector is not None
    reconciler = Reconciler(registry, [EngineSource.STORE, *([EngineSource.PODS] if pods else [])], clock)
    store = _store(settings, Entries(reconciler), clock)
    feeds: list[Callable[[], AbstractAsyncContextManager[None]]] = []
    if pods:
        api = Kubernetes(Cluster.around(settings.kubernetes_namespace))
        selector = {"labelSelector": settings.kubernetes_selector or ""}
        what = Collection(f"/api/v1/namespaces/{api.namespace}/pods", selector)
        feeds.append(Reflector(api, what, read_pod, Pods(reconciler), clock=clock, chance=random.random).running)
    return Discovery(registry, reconciler, store, feeds, tell)


def _store(settings: Settings, told: StoreObserver, clock: Callable[[], float]) -> Store:
    kind, _, where = settings.store.partition(":")
    match kind:
        case "memory":
            return MemoryStore(told)
        case "file":
            return FileStore(where, told)
        case "kubernetes":
            api = Kubernetes(Cluster.around(settings.kubernetes_namespace))
            return ConfigMapStore(api, where, told, clock=clock)
        case _:
            try:
                from xpyd_proxy.io.discovery.stores.redis import RedisStore  # noqa: PLC0415 (its library is an extra)
            except ImportError as exc:
                raise ConfigError("the store is Redis, but redis is not installed: pip install 'xpyd[redis]'") from exc
            return RedisStore(settings.store, told, password=os.environ.get("XPYD_REDIS_PASSWORD"))


def read_pod(meta: Meta, raw: msgspec.Raw) -> Wanted | AddressError | None:
    """Read a pod; what is wrong with it is a value, too."""
    try:
        return engine_of(decode(raw, Pod))
    except AddressError as exc:
        return exc
    except NotJson as exc:
        return AddressError(f"pod {meta.name} is not what Kubernetes calls a pod: {exc}")
