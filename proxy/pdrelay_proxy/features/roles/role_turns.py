"""How the controller of roles has engines turn."""

from typing import Protocol

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.role_lease import RoleHold


class RoleTurns(Protocol):
    """Has engines turn, for the one router that decides."""

    async def hold(self) -> RoleHold:
        """Take the lease, or go on holding it, and tell who has it; never raises."""
        ...

    async def begin(self, name: InstanceId, role: Role, /, *, counts: bool = True) -> str:
        """Write down that an engine turns, and have it begin; say why it does not.

        Empty: it does. Never raises.

        ``counts``: it is one of the turns of an hour.
        """
        ...
