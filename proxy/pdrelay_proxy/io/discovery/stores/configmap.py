"""A store in a ConfigMap: one key for each engine, so that routers never write what another one
wrote.
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
from pdrelay_proxy.io.discovery.kubernetes import KubeError, Kubernetes
from pdrelay_proxy.io.discovery.reflector import Collection, Reflector, WatchTimes
from pdrelay_proxy.io.discovery.stores import StoreDown, StoreObserver

logger = logging.getLogger(__name__)
_TRIES: Final = 5
_PAUSE_S: Final = 0.1  # before the second try; doubled with every further one
_LATE_S: Final = 10.0  # for so long a view that is older than another one is late, not a new truth


class _Map(msgspec.Struct):
    metadata: Meta
    data: dict[str, str] | None = None


class ConfigMapStore:
    """The ConfigMap must exist (the chart makes it); of the API it takes list and watch of it, and
    patch.
    """

    def __init__(
        self,
        api: Kubernetes,
        name: str,
        told: StoreObserver,
        *,
        clock: Callable[[], float],
        rhythm: WatchTimes = WatchTimes(),  # noqa: B008 (frozen)
    ) -> None:
        self._api = api
        self._name = name
        self._told = told
        self._clock = clock  # seconds; only differences count
        # uid and version of the newest view, and when it came
        self._latest: tuple[str, int, float] = ("", 0, 0.0)
        self._kept: Mapping[str, str] = {}  # the view
        maps = f"/api/v1/namespaces/{api.namespace}/configmaps"
        self._path = f"{maps}/{name}"
        what = Collection(maps, {"fieldSelector": f"metadata.name={name}"})
        self._reflector = Reflector(
            api, what, _map, self, clock=clock, chance=random.random, rhythm=rhythm
        )

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry; raises StoreDown."""
        await self._merge({name: text})

    async def delete(self, name: str, /) -> None:
        """Drop an entry; raises StoreDown."""
        await self._merge({name: None})

    async def replace(self, name: str, before: str, after: str | None, /) -> bool:
        """Write an entry anew, or drop it, if it is still as it was; raises StoreDown."""
        place = f"/data/{name}"
        steps: list[dict[str, str]] = [{"op": "test", "path": place, "value": before}]
        steps.append(
            {"op": "remove", "path": place}
            if after is None
            else {"op": "replace", "path": place, "value": after}
        )
        try:
            await self._patch(partial(self._api.json_patch, self._path, msgspec.json.encode(steps)))
        except StoreDown as exc:
            if (
                not isinstance(exc.__cause__, KubeError)
                or exc.__cause__.status != HTTPStatus.UNPROCESSABLE_ENTITY
            ):
                raise
            found = (await self._merge({})).get(name)  # which changes nothing: it asks
            if found == before:  # so it was refused for another reason
                raise
            return found == after  # an earlier try has been made, whose answer was lost
        return True

    def running(self) -> AbstractAsyncContextManager[None]:
        """Watch the ConfigMap."""
        return self._reflector.running()

    async def take(self, objects: Mapping[str, _Map | None], /) -> None:
        """Take what the watch has seen: this one object, if it is there."""
        found = next((one for one in objects.values() if one is not None), None)
        if found is None:
            logger.warning(
                "there is no ConfigMap %s: make an empty one; the last view of it stays", self._name
            )
            return
        uid, version, when = self._latest
        if (
            found.metadata.uid == uid
            and _number(found) < version
            and self._clock() < when + _LATE_S
        ):
            return  # it was on its way when we made a change
        self._keep(found)
        await self._told.take(self._kept)

    def heard(self) -> None:
        """Pass it on."""
        self._told.heard()

    async def _merge(self, data: Mapping[str, str | None]) -> Mapping[str, str]:
        return await self._patch(
            partial(self._api.merge_patch, self._path, msgspec.json.encode({"data": data}))
        )

    async def _patch(self, patch: Callable[[], Awaitable[bytes]]) -> Mapping[str, str]:
        """Make a change; return what the map has then."""
        pause = _PAUSE_S
        for number in range(1, _TRIES + 1):
            try:
                found = decode(await patch(), _Map)
            except (KubeError, NotJson) as exc:
                # A patch can be made twice, where another try may succeed.
                status = exc.status if isinstance(exc, KubeError) else 0
                is_passing = status is None or status in (401, 409, 429) or status >= 500
                if number == _TRIES or not is_passing:
                    raise StoreDown(f"the ConfigMap {self._name} was not changed: {exc}") from exc
                await asyncio.sleep(pause * (0.5 + random.random() / 2))
                pause *= 2
            else:
                # Versions rise for all objects. An older view would stay: the watch does not repeat
                # what it has said.
                if _number(found) >= self._latest[1]:
                    self._keep(found)
                # also one that the watch has brought, and is still taken in
                await self._told.take(self._kept)
                return found.data or {}
        raise AssertionError("the last try returns or raises")

    def _keep(self, found: _Map) -> None:
        self._latest = (found.metadata.uid, _number(found), self._clock())
        self._kept = found.data or {}


def _map(_meta: Meta, raw: msgspec.Raw) -> _Map | None:
    try:
        return decode(raw, _Map)
    except NotJson:
        logger.exception("a ConfigMap has other data than texts")
        return None


def _number(found: _Map) -> int:
    """Return the version as a number: they rise. 0: it is none."""
    text = found.metadata.resource_version
    return int(text) if text.isascii() and text.isdigit() else 0
