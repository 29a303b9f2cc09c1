"""One connection to an engine, for the requests of one look. httpcore stops at this file.

httpx's own transport opens a pool of connections, and connects by anyio: more than half of what a
look costs.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager, suppress

import httpcore
import httpx

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.errors import NotAllowed
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.engine_tls import EngineTls


class OneConnection(httpx.AsyncBaseTransport):
    """Sends one request after the other; it connects anew if the engine has closed, or to another
    address, and where the guard of added engines says.
    """

    def __init__(self, tls: EngineTls, guard: Guard | None = None) -> None:
        self._tls = tls
        self._guard = guard
        self._connection: httpcore.AsyncHTTPConnection | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return a response whose body is still to come.

        Raises httpx.ConnectError, and httpx.ReadError for the rest.

        It waits as long as its task does.
        """
        url = request.url
        place = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        sent = httpcore.Request(
            request.method, place, headers=request.headers.raw, content=request.stream
        )
        with _errors_of_httpx():
            answer = await (await self._connected(place.origin)).handle_async_request(sent)
        assert isinstance(answer.stream, AsyncIterable)
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Body(answer.stream, answer.aclose)
        )

    async def aclose(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            await self._connection.aclose()
            self._connection = None

    async def _connected(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        connection = self._connection
        if (
            connection is not None
            and connection.can_handle_request(origin)
            and connection.is_available()
            and not connection.has_expired()
        ):
            return connection
        await self.aclose()
        sockets = _Sockets(self._tls if origin.scheme == b"https" else None, self._guard)
        self._connection = httpcore.AsyncHTTPConnection(
            origin, ssl_context=self._tls.context, network_backend=sockets
        )
        return self._connection


class _Body(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterable[bytes], close: Callable[[], Awaitable[None]]) -> None:
        self._pieces = pieces
        self._close = close

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        with _errors_of_httpx():
            async for piece in self._pieces:
                yield piece

    async def aclose(self) -> None:
        await self._close()


@contextmanager
def _errors_of_httpx() -> Generator[None]:
    try:
        yield
    except httpcore.ConnectError as exc:
        raise httpx.ConnectError(str(exc)) from exc
    except (httpcore.NetworkError, httpcore.ProtocolError) as exc:
        raise httpx.ReadError(str(exc)) from exc


class _Sockets(httpcore.AsyncNetworkBackend):
    """Connects as asyncio does; over TLS from the first byte, where it is given."""

    def __init__(self, tls: EngineTls | None, guard: Guard | None) -> None:
        self._tls = tls
        self._guard = guard

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # the signature is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            return await self._connected(host, port)
        except (NotAllowed, OSError) as exc:  # certificates that do not fit are among these
            raise httpcore.ConnectError(str(exc)) from exc

    async def _connected(self, host: str, port: int) -> "_Stream":
        """Connect to the host, or to the first of its checked addresses that accepts."""
        address = Address("http" if self._tls is None else "https", host, port)
        ips = () if self._guard is None else await self._guard.ips_of(address)
        for ip in ips[:-1]:
            with suppress(OSError):
                return await self._open(address, ip)
        return await self._open(address, ips[-1] if ips else host)

    async def _open(self, address: Address, host: str) -> "_Stream":
        tls = self._tls
        context, name = (None, None) if tls is None else (tls.context, tls.name_of(address))
        return _Stream(
            *await asyncio.open_connection(host, address.port, ssl=context, server_hostname=name)
        )


class _Stream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as exc:
            raise httpcore.ReadError(str(exc)) from exc

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as exc:
            raise httpcore.WriteError(str(exc)) from exc

    async def aclose(self) -> None:
        if self._writer.get_extra_info("ssl_object") is None:
            self._writer.close()
        else:
            # TLS would wait for the engine's last word, for half a minute if it hangs
            self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return self  # it began so

    def get_extra_info(self, info: str) -> object:
        """Say before the next request whether the engine has closed meanwhile (httpcore asks)."""
        return self._reader.at_eof() if info == "is_readable" else None
