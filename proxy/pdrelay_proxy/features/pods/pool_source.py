"""The pods of an InferencePool: a watch of the pool, and a watch of the pods that it selects."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import msgspec

from pdrelay_proxy.core.discovery.kubernetes_objects import Meta
from pdrelay_proxy.core.fleet.target import Wanted
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.features.kubernetes.client import Kubernetes
from pdrelay_proxy.features.kubernetes.reflector import Collection, Reflector, WatchTimes
from pdrelay_proxy.features.pods.inference_pool import PATH, PoolMembers, UnusablePool, read_pool
from pdrelay_proxy.features.pods.pod import Mark, read_pod
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects

logger = logging.getLogger(__name__)
# of one pod, one for each port of the pool
_Engines: TypeAlias = Sequence[Wanted | AddressError | None]
PODS: Final = "/api/v1/namespaces/{}/pods"
_RHYTHM: Final = WatchTimes()
_PAUSE_S: Final = 5.0  # before the next try, if the account's files cannot be read


class PoolSource:
    """Two tasks; run them for as long as the router serves.

    If the pool is deleted, or becomes invalid, the pods that it selected last stay the engines.
    """

    def __init__(
        self,
        api: Callable[[], Kubernetes],
        name: str,
        pods: EngineObjects,
        *,
        slice_label: str = Mark.SLICE,
        clock: Callable[[], float],
        chance: Callable[[], float],
        rhythm: WatchTimes = _RHYTHM,
    ) -> None:
        self._api = api  # makes a client, which its watch closes
        self._name = name
        self._pods = pods
        self._slice_label = slice_label
        self._clock = clock  # seconds; only differences count
        self._chance = chance  # 0 to 1
        self._rhythm = rhythm
        self._members: PoolMembers | None = None  # None: the pool has not been read yet
        self._changed = asyncio.Event()
        self._trouble = ""  # what was logged last

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Follow the pool while the block lasts."""
        api = self._api()
        collection = Collection(
            PATH.format(api.namespace), {"fieldSelector": f"metadata.name={self._name}"}
        )
        watch = Reflector(
            api,
            collection,
            read_pool,
            self,
            clock=self._clock,
            chance=self._chance,
            rhythm=self._rhythm,
        )
        async with watch.running(), meanwhile(self._follow()):
            yield

    async def receive(self, objects: Mapping[str, PoolMembers | UnusablePool], /) -> None:
        """Take the pool: there is one of the name, or none."""
        pool = next(iter(objects.values()), UnusablePool(f"there is no InferencePool {self._name}"))
        if isinstance(pool, UnusablePool):
            if pool.reason != self._trouble:
                suffix = "" if self._members is None else "; the pods that it selected last stay"
                logger.warning("%s%s", pool.reason, suffix)
            self._trouble = pool.reason
            return
        self._trouble = ""
        if pool != self._members:
            logger.info(
                "InferencePool %s selects %s, ports %s", self._name, pool.selector, pool.ports
            )
            self._members = pool
            self._changed.set()

    def heard(self) -> None:
        """How old the view of the engines is depends on the watch of the pods alone."""

    async def _follow(self) -> None:
        """Watch the pods that the pool selects now, until it selects others."""
        while True:
            self._changed.clear()
            members = self._members
            if members is None:
                await self._changed.wait()
                continue
            try:
                async with self._watch(members).running():
                    await self._changed.wait()
            except Exception:  # also a bug: it must not end the discovery for ever
                logger.exception(
                    "the pods of InferencePool %s cannot be watched; the last view stays",
                    self._name,
                )
                await asyncio.sleep(_PAUSE_S)

    def _watch(self, members: PoolMembers) -> Reflector[_Engines]:
        api = self._api()
        label = self._slice_label
        pods = _PortedPods(self._pods, len(members.ports))

        def read(meta: Meta, raw: msgspec.Raw) -> _Engines:
            return [
                read_pod(meta, raw, port, is_first=number == 0, slice_label=label)
                for number, port in enumerate(members.ports)
            ]

        collection = Collection(PODS.format(api.namespace), {"labelSelector": members.selector})
        return Reflector(
            api,
            collection,
            read,
            pods,
            clock=self._clock,
            chance=self._chance,
            rhythm=self._rhythm,
            changed=pods.changed,
        )


class _PortedPods:
    """Passes the engines of pods with several ports on, each as its own object."""

    def __init__(self, pods: EngineObjects, ports: int) -> None:
        self._pods = pods
        self._ports = ports
        self.heard = pods.heard

    async def receive(self, objects: Mapping[str, _Engines], /) -> None:
        """Take all pods, in steps."""
        await self._pods.receive(
            {
                f"{uid}/{number}": engine
                for uid, engines in objects.items()
                for number, engine in enumerate(engines)
            }
        )

    def changed(self, objects: Mapping[str, _Engines | None], /) -> None:
        """Take some pods that have changed; None: it is gone."""
        none: _Engines = [None] * self._ports
        self._pods.changed(
            {
                f"{uid}/{number}": engine
                for uid, engines in objects.items()
                for number, engine in enumerate(none if engines is None else engines)
            }
        )
