"""The pods of an InferencePool: one watch of the pool, and one of the pods that it selects at the
time.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import msgspec

from pdrelay_proxy.core.discovery.kubernetes_objects import Meta
from pdrelay_proxy.core.fleet.target import Wanted
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.features.pods.inference_pool import PATH, PoolMembers, UnusablePool, read_pool
from pdrelay_proxy.features.pods.pod import Mark, read_pod
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.discovery.kubernetes import Kubernetes
from pdrelay_proxy.io.discovery.reconciler import Pods
from pdrelay_proxy.io.discovery.reflector import Collection, Reflector, WatchTimes

logger = logging.getLogger(__name__)
# of one pod, one for each port of the pool
_Engines: TypeAlias = Sequence[Wanted | AddressError | None]
PODS: Final = "/api/v1/namespaces/{}/pods"
_RHYTHM: Final = WatchTimes()
_PAUSE_S: Final = 5.0  # before the next try, if the account's files cannot be read


class PoolSource:
    """Two tasks; run them for as long as the router serves.

    A pool that is gone, or makes no sense, changes nothing: the pods that it selected last stay the
    engines.
    """

    def __init__(
        self,
        api: Callable[[], Kubernetes],
        name: str,
        pods: Pods,
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
        self._members: PoolMembers | None = None  # None: the pool has not been seen yet
        self._changed = asyncio.Event()
        self._trouble = ""  # what was logged last

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Follow the pool while the block lasts."""
        api = self._api()
        what = Collection(
            PATH.format(api.namespace), {"fieldSelector": f"metadata.name={self._name}"}
        )
        watch = Reflector(
            api, what, read_pool, self, clock=self._clock, chance=self._chance, rhythm=self._rhythm
        )
        async with watch.running(), meanwhile(self._follow()):
            yield

    async def receive(self, objects: Mapping[str, PoolMembers | UnusablePool], /) -> None:
        """Take the pool: there is one of the name, or none."""
        found = next(
            iter(objects.values()), UnusablePool(f"there is no InferencePool {self._name}")
        )
        if isinstance(found, UnusablePool):
            if found.why != self._trouble:
                kept = "" if self._members is None else "; the pods that it selected last stay"
                logger.warning("%s%s", found.why, kept)
            self._trouble = found.why
            return
        self._trouble = ""
        if found != self._members:
            logger.info(
                "InferencePool %s selects %s, ports %s", self._name, found.selector, found.ports
            )
            self._members = found
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
            except Exception:  # also a bug: it must not end the discovery for good
                logger.exception(
                    "the pods of InferencePool %s cannot be watched; the last view stays",
                    self._name,
                )
                await asyncio.sleep(_PAUSE_S)

    def _watch(self, members: PoolMembers) -> Reflector[_Engines]:
        api = self._api()
        label = self._slice_label
        seen = _PortedPods(self._pods, len(members.ports))

        def read(meta: Meta, raw: msgspec.Raw) -> _Engines:
            return [
                read_pod(meta, raw, port, is_first=number == 0, slice_label=label)
                for number, port in enumerate(members.ports)
            ]

        what = Collection(PODS.format(api.namespace), {"labelSelector": members.selector})
        return Reflector(
            api,
            what,
            read,
            seen,
            clock=self._clock,
            chance=self._chance,
            rhythm=self._rhythm,
            changed=seen.changed,
        )


class _PortedPods:
    """Passes on the engines of pods that have several, each as an object of its own."""

    def __init__(self, pods: Pods, ports: int) -> None:
        self._pods = pods
        self._ports = ports
        self.heard = pods.heard

    async def receive(self, objects: Mapping[str, _Engines], /) -> None:
        """Take all pods, in steps."""
        await self._pods.receive(
            {f"{uid}/{n}": one for uid, engines in objects.items() for n, one in enumerate(engines)}
        )

    def changed(self, objects: Mapping[str, _Engines | None], /) -> None:
        """Take some pods that have changed; None: it is gone."""
        none: _Engines = [None] * self._ports
        self._pods.changed(
            {
                f"{uid}/{n}": one
                for uid, engines in objects.items()
                for n, one in enumerate(none if engines is None else engines)
            }
        )
