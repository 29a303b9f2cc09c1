"""The port by which the controller changes the roles of engines."""

from typing import Protocol

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.role_lease import RoleHold


class RoleChanges(Protocol):
    """Changes roles, for the one router that decides."""

    async def hold(self) -> RoleHold:
        """Take or renew the lease, and return who holds it; never raises."""
        ...

    async def begin(self, name: InstanceId, role: Role, /, *, counts: bool = True) -> str:
        """Record a role change and begin it; return why it did not begin (empty: it did).

        ``counts``: it counts against turns_per_hour. Never raises.
        """
        ...
