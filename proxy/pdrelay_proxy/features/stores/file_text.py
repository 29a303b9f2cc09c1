"""A short text that processes of one machine share, in a file beside the engines of a store."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from pdrelay_proxy.features.stores.file_lock import LOCK_WAIT_S, PATIENCE_S, locked
from pdrelay_proxy.io.discovery.store import StoreDown

_T = TypeVar("_T")
_MOST_BYTES: Final = 64 * 1024


class FileText:
    """A file beside that of the store; processes of one machine change it under a lock."""

    def __init__(
        self, path: str, *, lock_wait_s: float = LOCK_WAIT_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._path = Path(path)
        self._lock_wait_s = lock_wait_s
        self._patience_s = patience_s  # for one access
        self._access: asyncio.Future[Any] | None = None  # the latest
        self._read = ""

    async def read(self) -> str:
        """Return the text; raises StoreDown."""
        try:
            self._read = await self._in_thread(self._content)
        except OSError as exc:
            raise StoreDown(f"{self._path} cannot be read: {exc.strerror}") from exc
        return self._read

    async def replace(self, text: str, /) -> bool:
        """Write the text, unless it has changed since it was read; raises StoreDown."""
        try:
            return await self._in_thread(lambda: self._replace_file(self._read, text))
        except OSError as exc:
            raise StoreDown(f"{self._path} cannot be written: {exc.strerror}") from exc

    async def aclose(self) -> None:
        """Close nothing: the file is opened for each access."""

    async def _in_thread(self, access: Callable[[], _T]) -> _T:
        """Make one access at a time: one that hangs keeps its thread, and no further one."""
        try:
            async with asyncio.timeout(self._patience_s):
                if self._access is not None:
                    await asyncio.wait((self._access,))
                thread = asyncio.ensure_future(asyncio.to_thread(access))
                self._access = thread
                # nobody may wait for it then
                thread.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                return await asyncio.shield(thread)
        except TimeoutError as exc:
            raise StoreDown(
                f"{self._path} was neither read nor written within {self._patience_s:g} s: its file "
                f"system hangs"
            ) from exc

    def _content(self) -> str:
        try:
            with self._path.open("rb") as file:
                return file.read(_MOST_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def _replace_file(self, before: str, text: str) -> bool:
        with locked(self._path, self._lock_wait_s):
            if self._content() != before:
                return False
            new = Path(f"{self._path}.new")
            try:
                new.write_text(text, encoding="utf-8")
                new.replace(self._path)
            except OSError:  # half a file takes room on a full disk
                with suppress(OSError):
                    new.unlink()
                raise
            self._read = text
            return True
