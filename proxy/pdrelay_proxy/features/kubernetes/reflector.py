"""Keeps a view of objects of the Kubernetes API.

A LIST replaces the view, a WATCH updates it, and after any doubt the reflector lists again
(client-go's Reflector).
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
from pdrelay_proxy.core.discovery.sources import MAX_ENGINES
from pdrelay_proxy.core.ports import Observer
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.features.kubernetes.client import Expired, KubeError, Kubernetes
from pdrelay_proxy.io.background import meanwhile

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PAGE: Final = 200  # objects of one page
_AT_A_TIME: Final = 10  # objects parsed before other tasks may run: half a millisecond
_SHORT_S: Final = 1.0  # a list and watch that is over sooner counts as failed


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Times, in seconds."""

    # give or take a quarter; repairs whatever a watch has missed
    relist_s: float = 300.0
    # a watch without a line for so long is dead: bookmarks come every minute
    silence_s: float = 90.0
    # before the next try after the first failure; doubled with every further one
    pause_s: float = 0.5
    pause_most_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Collection:
    """The path and the selectors of the objects."""

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
    """Lists and watches in one task, for as long as the router serves."""

    def __init__(
        self,
        api: Kubernetes,
        collection: Collection,
        read: Callable[[Meta, msgspec.Raw], T],
        observer: Observer[T],
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        rhythm: WatchTimes = WatchTimes(),
        changed: Callable[[Mapping[str, T | None]], None] | None = None,
    ) -> None:
        self._api = api
        self._collection = collection
        self._read = read  # raises nothing: returns a value also for an object that makes no sense
        self._observer = observer
        # takes changed objects (None: it is gone); without it ``observer`` gets the whole view
        self._changed = changed
        self._clock = clock  # seconds; only differences count
        self._chance = chance  # 0 to 1, so that several routers do not list at the same moment
        self._rhythm = rhythm
        # version and value by uid: a name may come back as another object
        self._items: dict[str, tuple[str, T]] = {}
        self._gone: set[str] = set()  # uids deleted since the list; none of them comes back
        self._listed = ""  # the version of the list
        self._since = math.inf  # when it was read

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Keep the view up to date while the block lasts; at its end the API's connections are
        closed.
        """
        async with self._api, meanwhile(self._run()):
            yield

    async def _run(self) -> None:
        failures = 0
        while True:
            self._since = math.inf
            retry_after_s = await self._list_and_watch(first=failures == 0)
            has_lasted = self._clock() - self._since >= _SHORT_S
            failures = (0 if has_lasted else failures) + (
                retry_after_s is not None or not has_lasted
            )
            pause_s = 0.0
            if failures:
                longest_s = min(
                    self._rhythm.pause_s * 2.0 ** min(failures - 1, 30), self._rhythm.pause_most_s
                )
                pause_s = longest_s * (0.5 + self._chance() / 2)
            await asyncio.sleep(max(retry_after_s or 0.0, pause_s))

    async def _list_and_watch(self, *, first: bool) -> float | None:
        """List and watch once.

        Return None, or after a failure the seconds until the API may be called again (Retry-After).
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
            logger.exception("the watch of %s failed", self._collection.path)
            return 0.0
        return None

    async def _list(self) -> None:
        items = dict[str, tuple[str, T]]()
        query = {**self._collection.query, "limit": str(_PAGE)}
        while True:
            body = await self._api.get(self._collection.path, query)
            await asyncio.sleep(0)  # joining megabytes took a while
            page = _sound(body, _Page)
            for number, raw in enumerate(page.items or ()):
                if number % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
                meta, item = self._item(raw)
                items[meta.uid] = item
            query["continue"] = page.metadata.more
            if not page.metadata.more or len(items) >= MAX_ENGINES:
                break
        if page.metadata.more:
            logger.error(
                "%s has more than %d objects: the rest is left out",
                self._collection.path,
                MAX_ENGINES,
            )
        self._items = items
        self._gone = set()
        self._listed = page.metadata.resource_version
        self._since = self._clock()
        await self._notify()

    async def _watch(self) -> None:
        """Follow the changes until anything ends it."""
        seconds = self._rhythm.relist_s * (0.75 + self._chance() / 2)
        query = {
            **self._collection.query,
            "watch": "true",
            "resourceVersion": self._listed,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        stream = self._api.watch(self._collection.path, query, silence_s=self._rhythm.silence_s)
        try:
            # also if the server ignores timeoutSeconds
            async with asyncio.timeout(seconds + 1), aclosing(stream) as events:
                async for lines in events:
                    applied = [self._apply(_sound(line, _Event)) for line in lines]
                    changed = {uid: self._items.get(uid) for uid in applied if uid is not None}
                    if not changed:
                        self._observer.heard()
                    elif self._changed is None:
                        await self._notify()
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
        """Apply an event; return the uid of the object that it changes, if any."""
        match event.type:
            case "BOOKMARK":
                return None
            case "ERROR":
                failure = _sound(event.object, _Failure)
                error_type = Expired if failure.code == HTTPStatus.GONE else KubeError
                raise error_type(
                    f"the watch of {self._collection.path} ends: {failure.message}",
                    status=failure.code,
                )
            case "DELETED":
                uid = _sound(event.object, _Holder).metadata.uid
                self._gone.add(uid)
                return None if self._items.pop(uid, None) is None else uid
            case "ADDED" | "MODIFIED":
                meta, item = self._item(event.object)
                known = self._items.get(meta.uid)
                seen_version = self._listed if known is None else known[0]
                version = meta.resource_version
                # a repeated or a late event
                is_old = (
                    seen_version.isdecimal()
                    and version.isdecimal()
                    and int(version) <= int(seen_version)
                )
                if meta.uid in self._gone or is_old:
                    return None
                self._items[meta.uid] = item
                return meta.uid
            case unknown:
                raise KubeError(
                    f"the watch of {self._collection.path} sends {unknown!r}, which is no event"
                )

    def _item(self, raw: msgspec.Raw) -> tuple[Meta, tuple[str, T]]:
        meta = _sound(raw, _Holder).metadata
        return meta, (meta.resource_version, self._read(meta, raw))

    async def _notify(self) -> None:
        await asyncio.sleep(0)  # parsing took a while
        await self._observer.receive({uid: value for uid, (_, value) in self._items.items()})


def _sound(data: bytes | msgspec.Raw, expected: type[T]) -> T:
    try:
        return decode(data, expected)
    except NotJson as exc:
        raise KubeError(f"the API says something else than Kubernetes does: {exc}") from exc
