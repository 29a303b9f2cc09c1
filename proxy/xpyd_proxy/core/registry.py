"""Which engines exist."""

from collections.abc import Sequence

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.errors import AlreadyKnown, NoInstance


class Registry:
    """The sets of engines, which may grow while requests are served."""

    def __init__(self) -> None:
        self._instances: dict[Role, list[Instance]] = {role: [] for role in Role}

    def add(self, role: Role, address: Address) -> Instance:
        """Start to route to an engine, under the next free id of its role.

        Raises:
            AlreadyKnown: the address is in the set of this role.
        """
        known = self._instances[role]
        for instance in known:
            if instance.address.authority == address.authority:
                raise AlreadyKnown(f"{address.authority} is already known as {instance.id}")
        instance = Instance(InstanceId(f"{role}-{len(known)}"), role, address)
        known.append(instance)
        return instance

    def known(self, role: Role) -> Sequence[Instance]:
        """List the engines of a role, in the order they were added."""
        return tuple(self._instances[role])

    def usable(self, role: Role) -> Sequence[Instance]:
        """List the engines of a role that can take a request.

        Raises:
            NoInstance: there is none.
        """
        if known := self.known(role):
            return known
        raise NoInstance(f"the router knows no {role} instance")
