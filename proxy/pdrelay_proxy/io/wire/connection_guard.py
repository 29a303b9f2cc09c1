"""Looks where a connection to an added engine would go, before it goes there, and has it go nowhere
else.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.http.address_allowlist import AllowList, is_ip
from pdrelay_proxy.errors import NotAllowed

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]  # raises OSError


async def resolved(host: str, port: int) -> Sequence[str]:
    """Ask the system where a name leads; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


class Guard:
    """Knows which addresses must be looked at: those that neither the settings nor a pod has named.

    A name is resolved once for each connection, and the connection goes to what was found: a name
    that leads elsewhere a moment later (DNS rebinding) changes nothing.
    """

    def __init__(
        self,
        allowed: AllowList,
        is_given: Callable[[Address], bool],
        resolve: Resolve | None = resolved,
    ) -> None:
        """``resolve``: None where nothing is connected, in tests that give a transport: names then
        pass as they are.
        """
        self._allowed = allowed
        self._is_given = is_given
        self._resolve = resolve

    async def places(self, address: Address) -> Sequence[str]:
        """Return the IP addresses to connect to, the best first; none: the host may be taken as it
        is.

        Raises:
            NotAllowed: it leads to where no engine may be added.
            OSError: the name leads nowhere.
        """
        host = address.host
        is_given = self._is_given(address)
        if is_ip(host):
            if is_given:
                return ()
        elif self._resolve is None:
            return ()
        found = await self.leads_to(address)
        if is_given and not is_ip(host):
            return found
        admitted = [place for place in found if self._allowed.admits(host, place)]
        if not admitted:
            led = "" if is_ip(host) else f" leads to {', '.join(found) or 'nothing'}, which"
            raise NotAllowed(
                f"{host}{led} is not in allowed_instances: name its network or its name there"
            )
        return admitted

    async def leads_to(self, address: Address) -> Sequence[str]:
        """Return the IP addresses of an engine, wherever they are; none: names are not resolved
        here.

        Raises:
            OSError: the name leads nowhere.
        """
        host = address.host
        if is_ip(host):
            return (host,)
        if self._resolve is None:
            return ()
        try:
            return await self._resolve(host, address.port)
        except UnicodeError as exc:
            raise OSError(f"{host} is no name that DNS can have") from exc
