"""vLLM over HTTP. httpx and its exceptions stop at this file."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Self

import httpx

from xpyd_proxy.core.model import Answer, Headers, Instance, Leg
from xpyd_proxy.errors import EngineError, EngineTimeout
from xpyd_proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer that is arriving."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]


class HttpEngines:
    """One connection pool for every engine; use it as a context manager."""

    def __init__(self, settings: Settings, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._probe_timeout_s = settings.probe_timeout_s
        self._client = httpx.AsyncClient(
            transport=transport,
            headers={"accept-encoding": "identity", "user-agent": "xpyd"},  # a stream must not wait for a compressor
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=settings.engine_keepalive_s),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # one client's cookies are not another's
            trust_env=False,  # HTTP_PROXY is for the way out, and engines are inside
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, leg: Leg, *, timeout_s: float) -> Answer:
        """Post, and wait at most so many seconds for the whole answer; giving up closes the connection.

        Raises:
            EngineTimeout: the answer did not come in time.
            EngineError: the engine cannot be reached, or broke off.
        """
        return await self._whole(leg.instance, self._post(leg), timeout_s)

    async def models(self, instance: Instance, headers: Headers) -> Answer:
        """Get the engine's list of models; raises what ``ask`` raises."""
        request = self._client.build_request("GET", f"{instance.address.url}/v1/models", headers=list(headers))
        return await self._whole(instance, request, self._probe_timeout_s)

    @asynccontextmanager
    async def stream(self, leg: Leg) -> AsyncGenerator[HttpStream]:
        """Post, and wait for the head; leaving the block closes the request, read or not.

        Raises:
            EngineTimeout: no connection in time.
            EngineError: the engine cannot be reached, or broke off.
        """
        with _translated(leg.instance):
            response = await self._client.send(self._post(leg), stream=True)
        try:
            async with aclosing(_chunks(leg.instance, response)) as chunks:
                yield HttpStream(response.status_code, _content_type(response), chunks)
        finally:
            await response.aclose()

    def _post(self, leg: Leg) -> httpx.Request:
        headers = [*leg.headers, (b"content-type", b"application/json")]
        return self._client.build_request(
            "POST", leg.instance.address.url + leg.path, content=leg.body, headers=headers
        )

    async def _whole(self, instance: Instance, request: httpx.Request, timeout_s: float) -> Answer:
        try:
            with _translated(instance):
                async with asyncio.timeout(timeout_s):
                    response = await self._client.send(request)
        except TimeoutError as exc:
            raise EngineTimeout(f"{instance.id} did not answer within {timeout_s:g} s") from exc
        return Answer(response.status_code, _content_type(response), response.content)


async def _chunks(instance: Instance, response: httpx.Response) -> AsyncGenerator[bytes]:
    with _translated(instance):
        async for chunk in response.aiter_raw():
            yield chunk


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
    except httpx.HTTPError as exc:
        raise EngineError(f"{instance.id} broke off before its answer was complete") from exc
