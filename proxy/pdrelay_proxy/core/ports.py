"""Interfaces that parts of the router need from others."""

from typing import Protocol

from pdrelay_proxy.core.model import Instance


class Releases(Protocol):
    """Learns whether a prefill engine has freed blocks that no engine will read; neither waits nor
    raises.
    """

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """``freed``: it has freed them. Otherwise they stay pinned until their lease ends."""
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
