"""A store in one file: it survives restarts, and processes of one machine share it."""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from pdrelay_proxy.core.discovery.reconcile import MOST, text_of_entry
from pdrelay_proxy.core.raw_json import Fields, NotJson, decode, encode, text
from pdrelay_proxy.io.background import meanwhile, repeatedly
from pdrelay_proxy.io.discovery.stores import (
    StoreDown,
    StoreNotWritten,
    StoreObserver,
    replace_entry,
)
from pdrelay_proxy.io.discovery.stores.file_lock import LOCK_WAIT_S, locked

logger = logging.getLogger(__name__)
_MOST_BYTES: Final = 16 * 1024 * 1024
_Stamp: TypeAlias = tuple[int, int, int]  # of the file: inode, time and size


class _FileContent:
    """What the file has: the entries, and those of them that are not written as texts."""

    def __init__(self, data: bytes) -> None:
        """Raises NotJson: it is no JSON object."""
        fields = decode(data, Fields) if data.strip() else {}
        self.entries: dict[str, str] = {}
        self._others: dict[str, tuple[str, msgspec.Raw]] = {}  # as an entry, and as it is written
        for name, raw in fields.items():
            try:
                self.entries[name] = decode(raw, str)
            except NotJson:  # left out where entries are read, and kept as it is
                self.entries[name] = text_of_entry(bytes(raw))
                self._others[name] = self.entries[name], raw

    def data(self) -> bytes:
        """Write it."""
        fields: Fields = {}
        for name, entry in self.entries.items():
            other = self._others.get(name)
            fields[name] = text(entry) if other is None or other[0] != entry else other[1]
        return msgspec.json.format(encode(fields), indent=1)


class FileStore:
    """One JSON object.

    It is replaced as a whole, under a lock that lies beside it; readers need none.
    """

    def __init__(
        self,
        path: str,
        told: StoreObserver,
        *,
        poll_s: float = 0.2,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        self._path = Path(path)
        self._told = told
        # seconds between two glances at whether another process has changed it
        self._poll_s = poll_s
        self._lock_wait_s = lock_wait_s
        self._seen: _Stamp | None = None
        self._trouble = ""  # what was logged last
        self._turn = asyncio.Lock()  # one change or glance of this process after the other

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry; raises StoreDown when the file cannot be written, or is full."""
        await self._change(lambda entries: entries.update({name: text}))

    async def delete(self, name: str, /) -> None:
        """Drop an entry; raises StoreDown."""
        await self._change(lambda entries: entries.pop(name, None))

    async def replace(self, name: str, before: str, after: str | None, /) -> bool:
        """Write an entry anew, or drop it, if it is still as it was; raises StoreDown."""
        entries = await self._change(lambda entries: replace_entry(entries, name, before, after))
        return entries.get(name) == after

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Read the file, and look again and again whether another process has changed it."""
        await self._glance()
        trouble = f"{self._path} could not be looked at"
        async with meanwhile(repeatedly(self._poll_s, self._glance, logger, trouble)):
            yield

    async def _glance(self) -> None:
        async with self._turn:
            try:
                stamp = self._stamp()
                if stamp == self._seen:
                    self._told.heard()
                else:
                    await self._take(await asyncio.to_thread(self._read), stamp)
                self._trouble = ""
            except StoreDown as exc:
                if str(exc) != self._trouble:
                    logger.warning("%s; the last view of it stays", exc)
                self._trouble = str(exc)

    async def _change(self, change: Callable[[dict[str, str]], object]) -> dict[str, str]:
        async with self._turn:
            entries, stamp = await asyncio.to_thread(self._rewritten, change)
            await self._take(entries, stamp)
            return entries

    async def _take(self, entries: dict[str, str], stamp: _Stamp) -> None:
        self._seen = stamp
        await self._told.take(entries)

    def _stamp(self) -> _Stamp:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return (0, 0, 0)
        except OSError as exc:
            raise StoreDown(f"{self._path} cannot be looked at: {exc.strerror}") from exc
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _rewritten(
        self, change: Callable[[dict[str, str]], object]
    ) -> tuple[dict[str, str], _Stamp]:
        """Change the file, and return what is in it then."""
        try:
            with locked(self._path, self._lock_wait_s):
                content = self._content()
                entries = content.entries
                # somebody has edited it: what makes it smaller is right
                most = max(MOST, len(entries))
                change(entries)
                data = content.data()
                if len(entries) > most or len(data) > _MOST_BYTES:
                    raise StoreNotWritten(
                        f"{self._path} has {len(entries)} engines, which is more than a router "
                        f"takes"
                    )
                self._replace(data)
                return entries, self._stamp()
        except OSError as exc:
            raise StoreNotWritten(f"{self._path} cannot be written: {exc.strerror}") from exc

    def _replace(self, data: bytes) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self._path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise

    def _read(self) -> dict[str, str]:
        return self._content().entries

    def _content(self) -> _FileContent:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return _FileContent(b"")
        except OSError as exc:
            raise StoreDown(f"{self._path} cannot be read: {exc.strerror}") from exc
        try:
            return _FileContent(data)
        except NotJson as exc:
            raise StoreDown(
                f"{self._path} is no JSON object of strings ({exc}): repair or remove it"
            ) from exc
