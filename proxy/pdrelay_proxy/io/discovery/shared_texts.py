"""A short text that routers share, beside the engines of a store: a feature keeps its lease
there.
"""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.io.discovery.kubernetes import KubeError, Kubernetes
from pdrelay_proxy.io.discovery.stores import StoreDown
from pdrelay_proxy.io.discovery.stores.file_lock import LOCK_WAIT_S, locked

_MOST_BYTES: Final = 64 * 1024
_CONFLICT: Final = 409  # the Lease has another resourceVersion


class MemoryText:
    """A text of this process alone."""

    def __init__(self) -> None:
        self._text = ""

    async def read(self) -> str:
        """Return the text."""
        return self._text

    async def replace(self, text: str, /) -> bool:
        """Write the text."""
        self._text = text
        return True

    async def aclose(self) -> None:
        """Close nothing."""


class FileText:
    """A file beside that of the store; processes of one machine change it under a lock."""

    def __init__(self, path: str, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._path = Path(path)
        self._lock_wait_s = lock_wait_s
        self._read = ""

    async def read(self) -> str:
        """Return the text; raises StoreDown."""
        try:
            self._read = await asyncio.to_thread(self._content)
        except OSError as exc:
            raise StoreDown(f"{self._path} cannot be read: {exc.strerror}") from exc
        return self._read

    async def replace(self, text: str, /) -> bool:
        """Write the text, unless it has changed since it was read; raises StoreDown."""
        try:
            return await asyncio.to_thread(self._replace_file, self._read, text)
        except OSError as exc:
            raise StoreDown(f"{self._path} cannot be written: {exc.strerror}") from exc

    async def aclose(self) -> None:
        """Close nothing: the file is opened for each access."""

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


class _LeaseMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class _LeaseObject(msgspec.Struct):
    metadata: _LeaseMeta


class LeaseText:
    """An annotation of a Lease (coordination.k8s.io), which must exist: the chart makes it.

    It needs the verbs get and patch on this one object. ``kubectl get lease`` shows its holder.
    """

    def __init__(self, api: Kubernetes, name: str, annotation: str, *, lasts_s: float) -> None:
        """``annotation``: its key; ``lasts_s``: for how long the holder named in the text has the
        lease.
        """
        self._api = api
        self._annotation = annotation
        self._lasts_s = lasts_s
        self._name = name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases/{name}"
        self._version = ""

    async def read(self) -> str:
        """Return the text; raises StoreDown."""
        try:
            return self._annotation_of(await self._api.get(self._path, {}))
        except (KubeError, NotJson) as exc:
            raise StoreDown(f"the Lease {self._name} cannot be read: {exc}") from exc

    async def replace(self, text: str, /) -> bool:
        """Write the text, unless the object has changed since it was read; raises StoreDown."""
        meta = {"resourceVersion": self._version, "annotations": {self._annotation: text}}
        spec = {
            "holderIdentity": decode(text.encode(), _LeaseHolder).holder,
            "leaseDurationSeconds": int(self._lasts_s),
            "renewTime": datetime.now(UTC)
            .isoformat(timespec="microseconds")
            .replace("+00:00", "Z"),
        }
        try:
            self._annotation_of(
                await self._api.merge_patch(
                    self._path, msgspec.json.encode({"metadata": meta, "spec": spec})
                )
            )
        except KubeError as exc:
            if exc.status == _CONFLICT:
                return False
            raise StoreDown(f"the Lease {self._name} was not changed: {exc}") from exc
        except NotJson as exc:
            raise StoreDown(f"the Lease {self._name} was not changed: {exc}") from exc
        return True

    async def aclose(self) -> None:
        """Close the client."""
        await self._api.__aexit__()

    def _annotation_of(self, body: bytes) -> str:
        metadata = decode(body, _LeaseObject).metadata
        self._version = metadata.resource_version
        return (metadata.annotations or {}).get(self._annotation, "")


class _LeaseHolder(msgspec.Struct):
    holder: str = ""
