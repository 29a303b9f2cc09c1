"""Puts the discovery of pods into a router."""

import random
from functools import partial
from typing import Final

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.feature import Feature
from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.kubernetes.reflector import Collection, Reflector
from pdrelay_proxy.features.pods.pod import read_pod
from pdrelay_proxy.features.pods.pool_source import PODS, PoolSource
from pdrelay_proxy.features.pods.settings import PodSettings
from pdrelay_proxy.io.background import Running
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.reconciler import EngineFeed, Reconciler
from pdrelay_proxy.settings import Settings


class PodsFeature(Feature):
    """Adds and removes engines with their pods."""

    @staticmethod
    def check(settings: Settings, /) -> None:
        """Raise ConfigError if both a selector and a pool name the pods."""
        chosen = settings.for_feature(PodSettings)
        if chosen.kubernetes_selector is not None and chosen.kubernetes_inference_pool is not None:
            raise ConfigError(
                "kubernetes_inference_pool has a selector of its own: leave out kubernetes_selector"
            )

    @staticmethod
    def finds_engines(settings: Settings, /) -> bool:
        """Tell whether pods are to be followed."""
        chosen = settings.for_feature(PodSettings)
        return (
            chosen.kubernetes_selector is not None or chosen.kubernetes_inference_pool is not None
        )

    def feed(self) -> EngineFeed | None:
        """Return the source of pods; None: no pods are named."""
        return self._follow if self.finds_engines(self.ground.settings) else None

    def _follow(self, reconciler: Reconciler) -> Running:
        """Return a task that feeds pods to the reconciler.

        Raises ConfigError: this router does not run in a pod.
        """
        settings = self.ground.settings
        clock = self.ground.clock
        chosen = settings.for_feature(PodSettings)
        cluster = Cluster.around(chosen.kubernetes_namespace)
        pods = EngineObjects(reconciler)
        if chosen.kubernetes_inference_pool is not None:
            cluster.tls()  # raises ConfigError now: the clients are made later
            return PoolSource(
                lambda: Kubernetes(cluster),
                chosen.kubernetes_inference_pool,
                pods,
                slice_label=chosen.slice_label,
                clock=clock,
                chance=random.random,
            ).running
        collection = Collection(
            PODS.format(cluster.namespace), {"labelSelector": chosen.kubernetes_selector or ""}
        )
        read = partial(read_pod, slice_label=chosen.slice_label)
        watch = Reflector(
            Kubernetes(cluster),
            collection,
            read,
            pods,
            clock=clock,
            chance=random.random,
            changed=pods.changed,
        )
        return watch.running


FEATURE: Final = PodsFeature
