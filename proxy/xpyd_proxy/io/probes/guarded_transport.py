"""A transport of httpx that connects where the guard of added engines says."""

from contextlib import suppress
from typing import Final

import httpx

from xpyd_proxy.core.address import Address
from xpyd_proxy.errors import NotAllowed
from xpyd_proxy.io.wire.connection_guard import Guard

_PORTS: Final = {"http": 80, "https": 443}


class GuardedTransport(httpx.AsyncBaseTransport):
    """A transport of httpx that connects where the guard says."""

    def __init__(self, transport: httpx.AsyncBaseTransport, guard: Guard) -> None:
        self._transport = transport
        self._guard = guard

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the address that was looked at; certificates are checked for the name."""
        url = request.url
        try:
            places = await self._guard.places(Address(url.scheme, url.host, url.port or _PORTS[url.scheme]))
        except (NotAllowed, OSError) as exc:
            raise httpx.ConnectError(str(exc), request=request) from exc
        if not places:
            return await self._transport.handle_async_request(request)
        request.extensions = {**request.extensions, "sni_hostname": url.host}
        for place in places[:-1]:
            request.url = url.copy_with(host=place)
            with suppress(httpx.ConnectError, httpx.ConnectTimeout):  # nothing has been sent: the next may take it
                return await self._transport.handle_async_request(request)
        request.url = url.copy_with(host=places[-1])
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close it."""
        await self._transport.aclose()
