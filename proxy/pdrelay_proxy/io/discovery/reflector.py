"""Keeps a view of objects of the Kubernetes API: a LIST replaces it, a WATCH keeps it, any doubt
lists anew.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Generic, TypeVar

import msgspec

from pdrelay_proxy.core.discovery.kubernetes_objects import Meta
from pdrelay_proxy.core.discovery.reconcile import MOST
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.discovery.kubernetes import Expired, KubeError, Kubernetes
from pdrelay_proxy.io.discovery.stores import Observer

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PAGE: Final = 200  # objects asked for at once
_AT_A_TIME: Final = 10  # objects that are read before others may run: half a millisecond
_SHORT_S: Final = 1.0  # a round that is over sooner counts as failed


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Times, in seconds."""

    # give or take a quarter: what a watch has lost is found then at the latest
    relist_s: float = 300.0
    # a watch in which nothing comes for so long is dead: bookmarks come every minute
    silence_s: float = 90.0
    # before the next try after the first failure; doubled with every further one
    pause_s: float = 0.5
    pause_most_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Collection:
    """Which objects."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])  # selectors


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str
    more: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Holder(msgspec.Struct):
    metadata: Meta


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""


class Reflector(Generic[T]):
    """One task; run it for as long as the router serves."""

    def __init__(
        self,
        api: Kubernetes,
        what: Collection,
        read: Callable[[Meta, msgspec.Raw], T],
        told: Observer[T],
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        rhythm: WatchTimes = WatchTimes(),
        changed: Callable[[Mapping[str, T | None]], None] | None = None,
    ) -> None:
        self._api = api
        self._what = what
        self._read = read  # raises nothing: an object that makes no sense is a value, too
        self._told = told
        # takes the objects of some events, None for one that is gone; None: ``told`` takes all
        self._changed = changed
        self._clock = clock  # seconds; only differences count
        self._chance = chance  # 0 to 1, so that the rounds of several routers do not fall together
        self._rhythm = rhythm
        # version and value by uid: a name may come back as another object
        self._items: dict[str, tuple[str, T]] = {}
        self._gone: set[str] = set()  # uids deleted since the list; none of them comes back
        self._listed = ""  # the version of the list
        self._since = math.inf  # when it was read

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Keep the view while the block lasts; at its end the API's connections are closed."""
        async with self._api, meanwhile(self._run()):
            yield

    async def _run(self) -> None:
        failures = 0
        while True:
            self._since = math.inf
            after = await self._round(first=failures == 0)
            lived = self._clock() - self._since >= _SHORT_S
            failures = (0 if lived else failures) + (after is not None or not lived)
            pause = 0.0
            if failures:
                longer = min(
                    self._rhythm.pause_s * 2.0 ** min(failures - 1, 30), self._rhythm.pause_most_s
                )
                pause = longer * (0.5 + self._chance() / 2)
            await asyncio.sleep(max(after or 0.0, pause))

    async def _round(self, *, first: bool) -> float | None:
        """List and watch once; return None, or after a failure how many seconds the API wants to be
        left alone.
        """
        try:
            await self._list()
            await self._watch()
        except Expired as exc:
            logger.info("%s; listing anew", exc)
        except KubeError as exc:
            logger.log(
                logging.WARNING if first else logging.INFO, "%s; the last view of it stays", exc
            )
            return exc.retry_after_s
        except Exception:  # a bug must not end the discovery for good
            logger.exception("the watch of %s failed", self._what.path)
            return 0.0
        return None

    async def _list(self) -> None:
        found = dict[str, tuple[str, T]]()
        query = {**self._what.query, "limit": str(_PAGE)}
        while True:
            body = await self._api.get(self._what.path, query)
            await asyncio.sleep(0)  # to put megabytes together took its time
            page = _sound(body, _Page)
            for number, raw in enumerate(page.items or ()):
                if number % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
                meta, item = self._item(raw)
                found[meta.uid] = item
            query["continue"] = page.metadata.more
            if not page.metadata.more or len(found) >= MOST:
                break
        if page.metadata.more:
            logger.error("%s has more than %d objects: the rest is left out", self._what.path, MOST)
        self._items = found
        self._gone = set()
        self._listed = page.metadata.resource_version
        self._since = self._clock()
        await self._tell()

    async def _watch(self) -> None:
        """Follow the changes until anything ends it."""
        seconds = self._rhythm.relist_s * (0.75 + self._chance() / 2)
        query = {
            **self._what.query,
            "watch": "true",
            "resourceVersion": self._listed,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        watching = self._api.watch(self._what.path, query, silence_s=self._rhythm.silence_s)
        try:
            # also if it knows no timeoutSeconds
            async with asyncio.timeout(seconds + 1), aclosing(watching) as events:
                async for lines in events:
                    applied = [self._apply(_sound(line, _Event)) for line in lines]
                    changed = {uid: self._items.get(uid) for uid in applied if uid is not None}
                    if not changed:
                        self._told.heard()
                    elif self._changed is None:
                        await self._tell()
                    else:
                        self._changed(
                            {
                                uid: None if item is None else item[1]
                                for uid, item in changed.items()
                            }
                        )
        except TimeoutError:
            return

    def _apply(self, event: _Event) -> str | None:
        """Take one event in; return the uid of the object that it changes, if any."""
        match event.type:
            case "BOOKMARK":
                return None
            case "ERROR":
                failure = _sound(event.object, _Failure)
                kind = Expired if failure.code == HTTPStatus.GONE else KubeError
                raise kind(
                    f"the watch of {self._what.path} ends: {failure.message}", status=failure.code
                )
            case "DELETED":
                uid = _sound(event.object, _Holder).metadata.uid
                self._gone.add(uid)
                return None if self._items.pop(uid, None) is None else uid
            case "ADDED" | "MODIFIED":
                meta, item = self._item(event.object)
                known = self._items.get(meta.uid)
                seen = self._listed if known is None else known[0]
                new = meta.resource_version
                # it came twice, or late
                is_old = seen.isdigit() and new.isdigit() and int(new) <= int(seen)
                if meta.uid in self._gone or is_old:
                    return None
                self._items[meta.uid] = item
                return meta.uid
            case other:
                raise KubeError(
                    f"the watch of {self._what.path} sends {other!r}, which is no event"
                )

    def _item(self, raw: msgspec.Raw) -> tuple[Meta, tuple[str, T]]:
        meta = _sound(raw, _Holder).metadata
        return meta, (meta.resource_version, self._read(meta, raw))

    async def _tell(self) -> None:
        await asyncio.sleep(0)  # to read them took its time
        await self._told.take({uid: value for uid, (_, value) in self._items.items()})


def _sound(data: bytes | msgspec.Raw, wanted: type[T]) -> T:
    try:
        return decode(data, wanted)
    except NotJson as exc:
        raise KubeError(f"the API says something else than Kubernetes does: {exc}") from exc
