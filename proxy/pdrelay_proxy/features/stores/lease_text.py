"""A short text that routers of a cluster share, in a Lease: a feature keeps its own lease there."""

from datetime import UTC, datetime
from typing import Final

import msgspec

from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.features.kubernetes.client import KubeError, Kubernetes
from pdrelay_proxy.io.discovery.store import StoreDown

_CONFLICT: Final = 409  # the Lease has another resourceVersion


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
