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

from pdrelay_proxy.core.discovery.sources import MAX_ENGINES
from pdrelay_proxy.core.discovery.store_entries import text_of_entry
from pdrelay_proxy.core.raw_json import Fields, NotJson, decode, encode, to_raw
from pdrelay_proxy.features.stores.file_lock import LOCK_WAIT_S, PATIENCE_S, locked
from pdrelay_proxy.io.background import meanwhile, repeatedly
from pdrelay_proxy.io.discovery.store import (
    StoreDown,
    StoreNotWritten,
    StoreObserver,
    replace_entry,
)

logger = logging.getLogger(__name__)
_MOST_BYTES: Final = 16 * 1024 * 1024
_Stamp: TypeAlias = tuple[int, int, int]  # a file's inode, time and size


class _FileContent:
    """The entries of the file, and those of them that are not JSON strings."""

    def __init__(self, data: bytes) -> None:
        """Raises NotJson: it is no JSON object."""
        fields = decode(data, Fields) if data.strip() else {}
        self.entries: dict[str, str] = {}
        # the entry's text, and its JSON in the file
        self._others: dict[str, tuple[str, msgspec.Raw]] = {}
        for name, raw in fields.items():
            try:
                self.entries[name] = decode(raw, str)
            except NotJson:  # discovery leaves it out; the file keeps it unchanged
                self.entries[name] = text_of_entry(bytes(raw))
                self._others[name] = self.entries[name], raw

    def data(self) -> bytes:
        """Return the file's bytes."""
        fields: Fields = {}
        for name, entry in self.entries.items():
            other = self._others.get(name)
            fields[name] = to_raw(entry) if other is None or other[0] != entry else other[1]
        return msgspec.json.format(encode(fields), indent=1)


class FileStore:
    """One file with one JSON object.

    It is replaced as a whole, under a lock file beside it; readers need no lock.
    """

    def __init__(
        self,
        path: str,
        observer: StoreObserver,
        *,
        poll_s: float = 0.2,
        lock_wait_s: float = LOCK_WAIT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._path = Path(path)
        self._observer = observer
        # seconds between two checks for changes of another process
        self._poll_s = poll_s
        self._lock_wait_s = lock_wait_s
        self._patience_s = patience_s  # for a whole change
        self._seen: _Stamp | None = None
        self._trouble = ""  # what was logged last
        self._lock = asyncio.Lock()  # this process makes one change or check at a time

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry; raises StoreDown if the file cannot be written, or is full."""
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
        """Read the file, and check regularly whether another process has changed it."""
        await self._check_file()
        trouble = f"{self._path} could not be looked at"
        async with meanwhile(repeatedly(self._poll_s, self._check_file, logger, trouble)):
            yield

    async def _check_file(self) -> None:
        async with self._lock:
            try:
                news = await asyncio.to_thread(self._news)
                if news is None:
                    self._observer.heard()
                else:
                    await self._send_view(*news)
                self._trouble = ""
            except StoreDown as exc:
                if str(exc) != self._trouble:
                    logger.warning("%s; the last view of it stays", exc)
                self._trouble = str(exc)

    async def _change(self, change: Callable[[dict[str, str]], object]) -> dict[str, str]:
        try:
            async with asyncio.timeout(self._patience_s), self._lock:
                entries, stamp = await asyncio.to_thread(self._rewrite, change)
                await self._send_view(entries, stamp)
                return entries
        except TimeoutError as exc:
            raise StoreDown(
                f"{self._path} was neither read nor written within {self._patience_s:g} s: its file "
                f"system hangs"
            ) from exc

    async def _send_view(self, entries: dict[str, str], stamp: _Stamp) -> None:
        self._seen = stamp
        await self._observer.receive(entries)

    def _stamp(self) -> _Stamp:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return (0, 0, 0)
        except OSError as exc:
            raise StoreDown(f"{self._path} cannot be looked at: {exc.strerror}") from exc
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _rewrite(self, change: Callable[[dict[str, str]], object]) -> tuple[dict[str, str], _Stamp]:
        """Change the file; return its new entries."""
        try:
            with locked(self._path, self._lock_wait_s):
                content = self._content()
                entries = content.entries
                # an edited file may be too large: a change that makes it smaller is right
                limit = max(MAX_ENGINES, len(entries))
                change(entries)
                data = content.data()
                if len(entries) > limit or len(data) > _MOST_BYTES:
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

    def _news(self) -> tuple[dict[str, str], _Stamp] | None:
        """Return the entries; None: the file is as it was seen last."""
        stamp = self._stamp()
        return None if stamp == self._seen else (self._content().entries, stamp)

    def _content(self) -> _FileContent:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return _FileContent(b"")
        except OSError as exc:
            raise StoreNotWritten(f"{self._path} cannot be read: {exc.strerror}") from exc
        try:
            return _FileContent(data)
        except NotJson as exc:
            raise StoreNotWritten(
                f"{self._path} is no JSON object of strings ({exc}): repair or remove it"
            ) from exc
