"""vLLM over HTTP. httpx and its exceptions stop at this file."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final, Self

import httpx

from xpyd_proxy.core.keys import Outbound
from xpyd_proxy.core.model import Answer, Headers, Instance, Leg
from xpyd_proxy.core.ports import nothing
from xpyd_proxy.core.whole import ANSWER_MOST, whole
from xpyd_proxy.errors import EngineError, EngineTimeout
from xpyd_proxy.io.guard import Guard, Guarded
from xpyd_proxy.settings import Settings

# What gets through httpx when a connection is reset as it opens: anyio asks a uvloop transport for a socket that it no
# longer has. Seen once in a dozen resets.
RESET_AT_ONCE: Final = (ConnectionError, AttributeError)


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer that is arriving."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]


class HttpEngines:
    """One connection pool for every engine; use it as a context manager."""

    def __init__(
        self,
        settings: Settings,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        outbound: Outbound | None = None,
        tls: ssl.SSLContext | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._outbound = outbound or Outbound()
        self._probe_timeout_s = settings.probe_timeout_s
        verify: ssl.SSLContext | bool = True if tls is None else tls
        limits = httpx.Limits(max_connections=None, keepalive_expiry=settings.engine_keepalive_s)
        if transport is None and guard is not None:
            transport = Guarded(httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False), guard)
        self._client = httpx.AsyncClient(
            transport=transport,
            verify=verify,
            headers={"accept-encoding": "identity", "user-agent": "xpyd"},  # a stream must not wait for a compressor
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s),
            limits=limits,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # one client's cookies are not another's
            trust_env=False,  # HTTP_PROXY is for the way out, and engines are inside
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def give_up(self, _instance: Instance, *, silent_s: float) -> int:  # noqa: ARG002 (as the other client's)
        """End nothing: httpx does not show its connections. Requests to an engine that hangs end by their limits."""
        return 0

    async def ask(self, leg: Leg, *, timeout_s: float) -> Answer:
        """Post, and wait at most so many seconds for the whole answer; giving up closes the connection.

        Raises:
            EngineTimeout: the answer did not come in time.
            EngineError: the engine cannot be reached, or broke off.
        """
        return await self._whole(leg.instance, self._post(leg), timeout_s)

    async def models(self, instance: Instance, headers: Headers, *, bare: bool = False) -> Answer:
        """Get the engine's list of models, ``bare``: without showing a key; raises what ``ask`` raises."""
        shown = list(self._outbound.bare(headers) if bare else self._outbound.headers(instance.role, headers))
        request = self._client.build_request("GET", f"{instance.address.url}/v1/models", headers=shown)
        return await self._whole(instance, request, self._probe_timeout_s)

    @asynccontextmanager
    async def stream(self, leg: Leg, *, sent: Callable[[], None] = nothing) -> AsyncGenerator[HttpStream]:
        """Post, and wait for the head; leaving the block closes the request, read or not.

        ``sent`` is called when the last byte of the request is on its way.

        Raises:
            EngineTimeout: no connection in time.
            EngineError: the engine cannot be reached, or broke off.
        """
        with _translated(leg.instance):
            response = await self._client.send(self._post(leg, sent), stream=True)
        try:
            _refuse_coding(leg.instance, response)
            async with aclosing(_chunks(leg.instance, response)) as chunks:
                yield HttpStream(response.status_code, _content_type(response), chunks)
        finally:
            await response.aclose()

    def _post(self, leg: Leg, sent: Callable[[], None] = nothing) -> httpx.Request:
        headers = [
            *self._outbound.headers(leg.instance.role, leg.headers),
            (b"content-type", leg.content_type),
            (b"content-length", str(len(leg.body)).encode()),
        ]
        content = _Body(leg.body, sent)
        return self._client.build_request("POST", leg.instance.address.url + leg.path, content=content, headers=headers)

    async def _whole(self, instance: Instance, request: httpx.Request, timeout_s: float) -> Answer:
        try:
            with _translated(instance):
                async with asyncio.timeout(timeout_s):
                    response = await self._client.send(request, stream=True)
                    try:
                        content = await _content(instance, response)
                    finally:
                        await response.aclose()
        except TimeoutError as exc:
            raise EngineTimeout(f"{instance.id} did not answer within {timeout_s:g} s") from exc
        load = str(response.headers.get("endpoint-load-metrics", "")).encode()
        return Answer(response.status_code, _content_type(response), content, load)


@dataclass(frozen=True, slots=True)
class _Body:
    """A request body that tells when it has been handed over."""

    body: bytes
    sent: Callable[[], None]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.body
        self.sent()  # it is only asked for more when this much has been written


async def _chunks(instance: Instance, response: httpx.Response) -> AsyncGenerator[bytes]:
    with _translated(instance):
        async for chunk in response.aiter_raw():
            yield chunk


async def _content(instance: Instance, response: httpx.Response) -> bytes:
    """Read all of an answer, in which nothing is packed."""
    _refuse_coding(instance, response)
    too_long = EngineError(f"{instance.id} answered with more than {ANSWER_MOST} bytes")
    return await whole(response.aiter_bytes(), ANSWER_MOST, too_long)


def _refuse_coding(instance: Instance, response: httpx.Response) -> None:
    if is_coded(response):
        raise EngineError(f"{instance.id} answered with a content coding, and none was asked for")


def is_coded(response: httpx.Response) -> bool:
    """Tell whether a body would have to be unpacked: 300 KB of gzip can be as many MB (RFC 9110, 8.4)."""
    return str(response.headers.get("content-encoding", "")).strip().lower() not in ("", "identity")


def _content_type(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", ""))


@contextmanager
def _translated(instance: Instance) -> Generator[None]:
    """Turn what httpx raises into our own words, which name no address."""
    try:
        yield
    except httpx.ConnectTimeout as exc:
        raise EngineTimeout(f"{instance.id} did not accept a connection in time", reached=False) from exc
    except httpx.ConnectError as exc:
        raise EngineError(f"{instance.id} cannot be reached", reached=False) from exc
    except (httpx.HTTPError, *RESET_AT_ONCE) as exc:
        raise EngineError(f"{instance.id} broke off before its answer was complete") from exc
