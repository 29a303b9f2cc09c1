"""Interfaces that parts of the router need from others."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from pdrelay_proxy.core.model import Instance

S_contra = TypeVar("S_contra", contravariant=True)


class Releases(Protocol):
    """Learns whether a prefill engine has freed unread blocks; neither waits nor raises."""

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """``freed``: it has freed them. Otherwise they stay pinned until their lease ends."""
        ...


class Observer(Protocol[S_contra]):
    """Receives views: texts of a store, objects of the Kubernetes API."""

    async def receive(self, objects: Mapping[str, S_contra], /) -> None:
        """Take in all objects, by name or uid, in steps between which other tasks run.

        When this returns, this view or a later one has been taken in; a later one may come before
        that.
        """
        ...

    def heard(self) -> None:
        """Note that the source answers, and that its latest view is still right."""
        ...


class SharedText(Protocol):
    """One short text that all routers of a store share."""

    async def read(self) -> str:
        """Return the text; empty: there is none.

        Raises StoreDown (io/discovery/store.py) with the reason.
        """
        ...

    async def replace(self, text: str, /) -> bool:
        """Replace the text that was read last; False: it has changed meanwhile.

        Raises StoreDown.
        """
        ...

    async def aclose(self) -> None:
        """Close its connections and files."""
        ...
