"""Checks where a connection to an added engine would lead, and lets it lead nowhere else."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.http.address_allowlist import AllowList, is_ip
from pdrelay_proxy.errors import NotAllowed

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]  # raises OSError


async def resolved(host: str, port: int) -> Sequence[str]:
    """Resolve a name by the system's resolver; raises OSError."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


class Guard:
    """Checks the addresses that neither the settings nor a pod has named.

    A name is resolved once for each connection, and the connection uses the addresses that were
    checked: a name that resolves differently a moment later (DNS rebinding) changes nothing.
    """

    def __init__(
        self,
        allowed: AllowList,
        is_given: Callable[[Address], bool],
        resolve: Resolve | None = resolved,
    ) -> None:
        """``resolve``: None in tests that give a transport, where nothing is connected: names then
        pass unresolved.
        """
        self._allowed = allowed
        self._is_given = is_given
        self._resolve = resolve

    async def ips_of(self, address: Address) -> Sequence[str]:
        """Return the IP addresses to connect to, the best first; none: connect to the host as it
        is.

        Raises:
            NotAllowed: it leads to where no engine may be added.
            OSError: the name does not resolve.
        """
        host = address.host
        is_given = self._is_given(address)
        if is_ip(host):
            if is_given:
                return ()
        elif self._resolve is None:
            return ()
        addresses = await self.leads_to(address)
        if is_given and not is_ip(host):
            return addresses
        admitted = [ip for ip in addresses if self._allowed.admits(host, ip)]
        if not admitted:
            leads_to = (
                "" if is_ip(host) else f" leads to {', '.join(addresses) or 'nothing'}, which"
            )
            raise NotAllowed(
                f"{host}{leads_to} is not in allowed_instances: name its network or its name there"
            )
        return admitted

    async def leads_to(self, address: Address) -> Sequence[str]:
        """Return the IP addresses of an engine, allowed or not; none: names are not resolved here.

        Raises:
            OSError: the name does not resolve.
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
