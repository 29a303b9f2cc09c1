"""Builds what finds engines: the pods of a cluster, and the store of those that were added by hand."""

import os
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

from pdrelay_proxy.core.discovery.pods import read_pod
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.core.ports import SharedText
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.discovery.inference_pool import PODS, PoolSource
from pdrelay_proxy.io.discovery.kubernetes import Cluster, Kubernetes
from pdrelay_proxy.io.discovery.reconciler import Discovery, Entries, Pods, Reconciler
from pdrelay_proxy.io.discovery.reflector import Collection, Reflector
from pdrelay_proxy.io.discovery.shared_texts import FileText, LeaseText, MemoryText
from pdrelay_proxy.io.discovery.stores import Store, StoreObserver
from pdrelay_proxy.io.discovery.stores.configmap import ConfigMapStore
from pdrelay_proxy.io.discovery.stores.file import FileStore
from pdrelay_proxy.io.discovery.stores.memory import MemoryStore
from pdrelay_proxy.settings import Settings


def build_discovery(settings: Settings, registry: Registry, clock: Callable[[], float]) -> Discovery:
    """Build what the settings ask for; raises ConfigError: this is no pod, or what the store needs is not installed."""
    selector, pool = settings.kubernetes_selector, settings.kubernetes_inference_pool
    pods = selector is not None or pool is not None
    reconciler = Reconciler(registry, [EngineSource.STORE, *([EngineSource.PODS] if pods else [])], clock)
    entries = Entries(reconciler)
    store = _store(settings, entries, clock)
    feeds: list[Callable[[], AbstractAsyncContextManager[None]]] = []
    if pods:
        cluster, seen = Cluster.around(settings.kubernetes_namespace), Pods(reconciler)
        if pool is not None:
            cluster.tls()  # raises ConfigError now: the clients are made later
            label = settings.slice_label
            source = PoolSource(
                lambda: Kubernetes(cluster), pool, seen, slice_label=label, clock=clock, chance=random.random
            )
            feeds.append(source.running)
        else:
            what = Collection(PODS.format(cluster.namespace), {"labelSelector": selector or ""})
            api, read = Kubernetes(cluster), partial(read_pod, slice_label=settings.slice_label)
            watch = Reflector(api, what, read, seen, clock=clock, chance=random.random, changed=seen.changed)
            feeds.append(watch.running)
    return Discovery(registry, reconciler, entries, store, feeds=feeds)


def build_shared_text(settings: Settings, name: str, *, lasts_s: float) -> SharedText:
    """Return a text beside the engines of the store; raises ConfigError: what the store needs is missing.

    ``lasts_s``: how long the lease that it is lasts, in seconds.
    """
    kind, _, where = settings.store.partition(":")
    match kind:
        case "memory":
            return MemoryText()
        case "file":
            return FileText(f"{where}.{name}")
        case "kubernetes":
            api = Kubernetes(Cluster.around(settings.kubernetes_namespace))
            return LeaseText(api, where, f"pdrelay/{name}", lasts_s=lasts_s)
        case _:
            from pdrelay_proxy.io.discovery.stores.redis import RedisText  # noqa: PLC0415 (_store has loaded it)

            return RedisText(settings.store, name, password=os.environ.get("PDRELAY_REDIS_PASSWORD"))


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
                from pdrelay_proxy.io.discovery.stores.redis import RedisStore  # noqa: PLC0415 (its library is an extra)
            except ImportError as exc:
                raise ConfigError(
                    "the store is Redis, but redis is not installed: pip install 'pdrelay[redis]'"
                ) from exc
            return RedisStore(settings.store, told, password=os.environ.get("PDRELAY_REDIS_PASSWORD"))
