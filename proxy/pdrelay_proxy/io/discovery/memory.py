"""What a router without a shared store has in its place: engines that end with it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from pdrelay_proxy.core.discovery.sources import MAX_ENGINES
from pdrelay_proxy.io.background import meanwhile
from pdrelay_proxy.io.discovery.store import StoreNotWritten, StoreObserver, replace_entry


class MemoryStore:
    """Always reachable, and always up to date."""

    def __init__(
        self, observer: StoreObserver, *, heartbeat_s: float = 1.0, max_engines: int = MAX_ENGINES
    ) -> None:
        self._observer = observer
        self._heartbeat_s = heartbeat_s
        self._max_engines = max_engines
        self._entries: dict[str, str] = {}

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry; raises StoreNotWritten if there are too many."""
        if len(self._entries) >= self._max_engines and name not in self._entries:
            raise StoreNotWritten(
                f"there are {self._max_engines} engines already, which is as many as a router takes"
            )
        self._entries[name] = text
        await self._observer.receive(dict(self._entries))

    async def delete(self, name: str, /) -> None:
        """Drop an entry."""
        self._entries.pop(name, None)
        await self._observer.receive(dict(self._entries))

    async def replace(self, name: str, before: str, after: str | None, /) -> bool:
        """Write an entry anew, or drop it, if it is still as it was."""
        replace_entry(self._entries, name, before, after)
        await self._observer.receive(dict(self._entries))
        return self._entries.get(name) == after

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Confirm the view every ``heartbeat_s`` seconds."""
        await self._observer.receive(dict(self._entries))
        async with meanwhile(self._beat()):
            yield

    async def _beat(self) -> None:
        while True:
            self._observer.heard()
            await asyncio.sleep(self._heartbeat_s)
