"""What parts of the router need from others."""

from typing import Protocol

from pdrelay_proxy.core.model import Instance, InstanceId, Role
from pdrelay_proxy.core.roles.role_lease import RoleHold


class Releases(Protocol):
    """Is told when a prefill engine was asked to free blocks nobody will read; never waits and never raises."""

    def released(self, prefill: Instance, /, *, freed: bool) -> None:
        """``freed``: it has freed them. Else they stay pinned until their lease runs out."""
        ...


class SharedText(Protocol):
    """One short text that all routers of a store share."""

    async def read(self) -> str:
        """Return it; empty: there is none. Raises StoreDown (io/discovery/stores), which says why."""
        ...

    async def replace(self, text: str, /) -> bool:
        """Write it in place of the one that was read last; False: that has changed meanwhile. Raises StoreDown."""
        ...

    async def aclose(self) -> None:
        """Close what it has open."""
        ...


class RoleTurns(Protocol):
    """Has engines turn, for the one router that decides."""

    async def hold(self) -> RoleHold:
        """Take the lease, or go on holding it, and tell who has it; never raises."""
        ...

    async def begin(self, name: InstanceId, role: Role, /, *, counts: bool = True) -> str:
        """Write down that an engine turns, and have it begin; say why it does not. Empty: it does. Never raises.

        ``counts``: it is one of the turns of an hour.
        """
        ...
