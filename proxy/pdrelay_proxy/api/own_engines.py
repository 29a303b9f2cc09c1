"""The engines that a caller may change and see: all with the admin key, those at its own address
with the join key.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fastapi import HTTPException, Request

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.http.own_address import is_own_address


def joining_host(request: Request) -> str | None:
    """Return the address of a caller with the join key; None: it has the admin key.

    ``OperatorAccess.authenticate`` has set it: a route that does not authenticate fails here.
    """
    host: str | None = request.state.joining_host
    return host


def not_own(host: str) -> HTTPException:
    """Return the one refusal for all engines of others, whether they exist or not."""
    return HTTPException(
        403,
        f"The join key is for engines at the caller's own address alone, and you call from {host}.",
    )


@dataclass(frozen=True, slots=True)
class OwnEngines:
    """Compares addresses of engines with those of callers."""

    leads_to: Callable[[Address], Awaitable[Sequence[str]]]  # IP addresses; raises OSError

    async def check(self, host: str | None, addresses: Sequence[Address]) -> None:
        """Raise HTTPException if a caller has the join key and an engine is not at its host."""
        if host is not None and not await self.are_at(host, addresses):
            raise not_own(host)

    async def are_at(self, host: str, addresses: Sequence[Address]) -> bool:
        """Return whether all engines at these addresses are at a host."""
        return all(
            await asyncio.gather(*[self._is_at(host, address) for address in set(addresses)])
        )

    async def among(self, host: str, members: Sequence[Member]) -> Sequence[Member]:
        """Return the engines at a host."""
        addresses = list({member.instance.address for member in members})
        results = await asyncio.gather(*[self._is_at(host, address) for address in addresses])
        own_addresses = {
            address for address, is_own in zip(addresses, results, strict=True) if is_own
        }
        return [member for member in members if member.instance.address in own_addresses]

    async def _is_at(self, host: str, address: Address) -> bool:
        try:
            return is_own_address(host, await self.leads_to(address))
        except OSError:  # a name that does not resolve
            return False
