"""A store in a ConfigMap: one key for each engine, so that routers never overwrite each other's
entries.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus
from typing import Final

import msgspec

from pdrelay_proxy.core.discovery.kubernetes_objects import Meta
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.features.kubernetes.client import KubeError, Kubernetes
from pdrelay_proxy.features.kubernetes.reflector import Collection, Reflector, WatchTimes
from pdrelay_proxy.io.discovery.store import StoreDown, StoreNotWritten, StoreObserver

logger = logging.getLogger(__name__)
_TRIES: Final = 5
_PAUSE_S: Final = 0.1  # before the second try; doubled with every further one
# for so long a view with an older version counts as late, not as a restored ConfigMap
_LATE_S: Final = 10.0


class _Map(msgspec.Struct):
    metadata: Meta
    data: dict[str, str] | None = None


class ConfigMapStore:
    """Keeps entries in a ConfigMap, which must exist (the chart makes it).

    It needs the verbs list, watch and patch on it.
    """

    def __init__(
        self,
        api: Kubernetes,
        name: str,
        observer: StoreObserver,
        *,
        clock: Callable[[], float],
        rhythm: WatchTimes = WatchTimes(),  # noqa: B008 (frozen)
    ) -> None:
        self._api = api
        self._name = name
        self._observer = observer
        self._clock = clock  # seconds; only differences count
        # uid and version of the newest view, and when it came
        self._latest: tuple[str, int, float] = ("", 0, 0.0)
        self._kept: Mapping[str, str] = {}  # the view
        maps = f"/api/v1/namespaces/{api.namespace}/configmaps"
        self._path = f"{maps}/{name}"
        collection = Collection(maps, {"fieldSelector": f"metadata.name={name}"})
        self._reflector = Reflector(
            api, collection, _map, self, clock=clock, chance=random.random, rhythm=rhythm
        )

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry; raises StoreDown."""
        await self._merge({name: text})

    async def delete(self, name: str, /) -> None:
        """Drop an entry; raises StoreDown."""
        await self._merge({name: None})

    async def replace(self, name: str, before: str, after: str | None, /) -> bool:
        """Write an entry anew, or drop it, if it is still as it was; raises StoreDown."""
        pointer = f"/data/{name}"
        steps: list[dict[str, str]] = [{"op": "test", "path": pointer, "value": before}]
        steps.append(
            {"op": "remove", "path": pointer}
            if after is None
            else {"op": "replace", "path": pointer, "value": after}
        )
        try:
            await self._patch(partial(self._api.json_patch, self._path, msgspec.json.encode(steps)))
        except StoreDown as exc:
            if (
                not isinstance(exc.__cause__, KubeError)
                or exc.__cause__.status != HTTPStatus.UNPROCESSABLE_ENTITY
            ):
                raise
            entry = (await self._merge({})).get(name)  # an empty patch: it only reads
            if entry == before:  # so the API refused the patch for another reason
                raise
            return entry == after  # an earlier try succeeded, and its answer was lost
        return True

    def running(self) -> AbstractAsyncContextManager[None]:
        """Watch the ConfigMap."""
        return self._reflector.running()

    async def receive(self, objects: Mapping[str, _Map | None], /) -> None:
        """Take in the watch's view: this one object, if it is there."""
        config_map = next((item for item in objects.values() if item is not None), None)
        if config_map is None:
            logger.warning(
                "there is no ConfigMap %s: make an empty one; the last view of it stays", self._name
            )
            return
        uid, version, received_at = self._latest
        if (
            config_map.metadata.uid == uid
            and _number(config_map) < version
            and self._clock() < received_at + _LATE_S
        ):
            return  # the watch sent it before our latest change
        self._keep(config_map)
        await self._observer.receive(self._kept)

    def heard(self) -> None:
        """Pass it on to the observer."""
        self._observer.heard()

    async def _merge(self, data: Mapping[str, str | None]) -> Mapping[str, str]:
        return await self._patch(
            partial(self._api.merge_patch, self._path, msgspec.json.encode({"data": data}))
        )

    async def _patch(self, patch: Callable[[], Awaitable[bytes]]) -> Mapping[str, str]:
        """Patch the ConfigMap; return its entries after it."""
        pause = _PAUSE_S
        is_refused = True  # by each try so far: none may have been made
        for number in range(1, _TRIES + 1):
            try:
                config_map = decode(await patch(), _Map)
            except (KubeError, NotJson) as exc:
                # A patch may be applied twice, so try again where that may help.
                status = exc.status if isinstance(exc, KubeError) else 0
                is_passing = status is None or status in (401, 409, 429) or status >= 500
                is_refused = is_refused and status in range(400, 500)
                if number == _TRIES or not is_passing:
                    error = StoreNotWritten if is_refused else StoreDown
                    raise error(f"the ConfigMap {self._name} has not taken it: {exc}") from exc
                await asyncio.sleep(pause * (0.5 + random.random() / 2))
                pause *= 2
            else:
                # Versions rise for all objects. An older view would stay: the watch does not repeat
                # an event.
                if _number(config_map) >= self._latest[1]:
                    self._keep(config_map)
                # also if the watch brought it and the observer is still receiving it
                await self._observer.receive(self._kept)
                return config_map.data or {}
        raise AssertionError("the last try returns or raises")

    def _keep(self, config_map: _Map) -> None:
        self._latest = (config_map.metadata.uid, _number(config_map), self._clock())
        self._kept = config_map.data or {}


def _map(_meta: Meta, raw: msgspec.Raw) -> _Map | None:
    try:
        return decode(raw, _Map)
    except NotJson:
        logger.exception("a ConfigMap has other data than texts")
        return None


def _number(config_map: _Map) -> int:
    """Return the version as a number, as versions rise; 0: it is not a number."""
    text = config_map.metadata.resource_version
    return int(text) if text.isascii() and text.isdigit() else 0
