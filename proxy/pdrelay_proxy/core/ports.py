"""What parts of the router need from others."""

from typing import Protocol

from pdrelay_proxy.core.model import Instance


class Releases(Protocol):
    """Is told when a prefill engine was asked to free blocks nobody will read; never waits and
    never raises.
    """

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """``freed``: it has freed them. Else they stay pinned until their lease runs out."""
        ...


class SharedText(Protocol):
    """One short text that all routers of a store share."""

    async def read(self) -> str:
        """Return it; empty: there is none.

        Raises StoreDown (io/discovery/stores), which says why.
        """
        ...

    async def replace(self, text: str, /) -> bool:
        """Write it in place of the one that was read last; False: that has changed meanwhile.

        Raises StoreDown.
        """
        ...

    async def aclose(self) -> None:
        """Close what it has open."""
        ...
