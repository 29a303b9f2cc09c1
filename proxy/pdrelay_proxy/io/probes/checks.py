"""Asks engines, beside the requests, whether they live and what they are. httpx stops at this
file.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Annotated, Final, TypeAlias, TypeVar

import httpx
import msgspec

from pdrelay_proxy.core.fleet import engine_metrics
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, facts_of_models
from pdrelay_proxy.core.fleet.engine_metrics import Numbers
from pdrelay_proxy.core.http.bounded_body import read_bounded
from pdrelay_proxy.core.http.response_head import VERSION_HEADER
from pdrelay_proxy.core.model import Headers, Instance, Role
from pdrelay_proxy.core.protocol.fault_table import is_lack
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.core.schemas import MOST_MODELS, EngineFact, ModelCard
from pdrelay_proxy.errors import NotAllowed, causes
from pdrelay_proxy.io.fair_timeout import FairTimeout
from pdrelay_proxy.io.probes.one_connection import OneConnection
from pdrelay_proxy.io.wire.connection_guard import Guard
from pdrelay_proxy.io.wire.engine_tls import EngineTls

T = TypeVar("T")
NextBytes: TypeAlias = Callable[[float], Awaitable[bytes]]  # within so many seconds
# what is unpacked has no bound
_HEADERS: Final = ((b"accept-encoding", b"identity"), (b"user-agent", b"pdrelay"))
_UNAUTHORIZED: Final = 401
_KEY_SETTINGS: Final = {
    Role.PREFILL: "PDRELAY_PREFILL_API_KEY or prefill_api_key_file",
    Role.DECODE: "PDRELAY_DECODE_API_KEY or decode_api_key_file",
}
# asyncio puts those of several addresses into one text
_REFUSED: Final = f"[Errno {errno.ECONNREFUSED}]"
_NO_ROUTE: Final = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)
_MOST_BYTES: Final = 8 * 1024 * 1024  # of one answer; /metrics of a busy engine has some hundred kB


class ProbeFailed(Exception):
    """The engine does not answer as one that lives; the message says how, without its address."""

    silent = True  # it does not answer at all


class ProbeInvalid(ProbeFailed):
    """The engine answers, but not as one that lives."""

    silent = False


class ProbeOfRouter(ProbeInvalid):
    """A router answers, this one or another: it would refuse the legs of all requests."""


class ProbeNotMade(ProbeFailed):
    """The router could not ask: it has too few descriptors, ports or buffers.

    That says nothing of the engine.
    """

    silent = False


class _ModelCards(msgspec.Struct):
    data: Annotated[list[ModelCard], msgspec.Meta(max_length=MOST_MODELS)]


class _Version(msgspec.Struct):
    version: EngineFact


class HttpChecks:
    """Opens a new connection for each probe: to accept one is part of living."""

    def __init__(
        self,
        *,
        timeout_s: float,
        headers: Callable[[Role], Headers] = lambda _: (),
        tls: EngineTls | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._headers = headers  # the key of the pool, if it wants one
        self._tls = tls or EngineTls.from_system()
        self._given = transport
        self._guard = guard

    @asynccontextmanager
    async def _connected(self) -> AsyncGenerator[httpx.AsyncBaseTransport]:
        """Give the transport of one probe.

        There is no client in front of it: its cookies, redirects and logins, which no probe needs,
        take a third of its time.
        """
        if self._given is not None:
            yield self._given
            return
        async with OneConnection(self._tls, self._guard) as transport:
            yield transport

    async def probe(self, instance: Instance, *, is_whole: bool = True) -> EngineCapabilities:
        """Ask whether it lives, then, in a whole probe, what it is.

        Raises ProbeFailed: it does not live.
        """
        async with self._connected() as transport:
            status, _ = await self._get(transport, instance, "/health")
            if status != 200:
                raise ProbeInvalid(f"answers /health with status {status}")
            return (
                await self._capabilities(transport, instance) if is_whole else EngineCapabilities()
            )

    async def touch(self, instance: Instance) -> None:
        """Ask whether it lives, without a key; raises ProbeFailed: it does not, or is a router."""
        async with self._connected() as transport:
            await self._get(transport, instance, "/health", bare=True)

    async def facts(self, instance: Instance) -> EngineCapabilities:
        """Ask for all that it says of itself.

        Raises ProbeFailed: it does not live, or keeps its metrics to itself.
        """
        facts = await self.probe(instance)
        return facts.updated((await self.numbers(instance)).facts)

    async def numbers(self, instance: Instance) -> Numbers:
        """Read its metrics; without any, all is unknown. Raises ProbeFailed: it does not answer."""
        return engine_metrics.read(await self.metrics(instance), instance.rank)

    async def metrics(self, instance: Instance) -> bytes:
        """Return its metrics as it writes them; nothing, if it has none.

        Raises ProbeFailed: it does not answer.
        """
        async with self._connected() as transport:
            status, body = await self._get(transport, instance, "/metrics")
            return body if status == 200 else b""

    async def timeline(self, instance: Instance, name: str) -> bytes | None:
        """Return what the engine noted of a request; None: it keeps no timelines.

        Raises ProbeFailed.
        """
        async with self._connected() as transport:
            status, body = await self._get(transport, instance, f"/v1/pdrelay/requests/{name}")
            return body if status == 200 else None

    @asynccontextmanager
    async def open(self, instance: Instance, path: str) -> AsyncGenerator[tuple[int, NextBytes]]:
        """Ask for an answer without end; yields its status, and what reads on: nothing when it is
        over after all.

        Raises ProbeFailed, as reading does, which takes the seconds that it may wait.
        """
        async with self._connected() as transport:
            with self._failures(instance, path, self._timeout_s):
                async with FairTimeout(self._timeout_s):
                    response = await transport.handle_async_request(self._request(instance, path))
            async with aclosing(response):
                _check_coding(response, path)
                pieces = response.aiter_raw()

                async def read(patience_s: float) -> bytes:
                    with self._failures(instance, path, patience_s):
                        async with asyncio.timeout(patience_s):
                            return await anext(pieces, b"")

                yield response.status_code, read

    async def _capabilities(
        self, transport: httpx.AsyncBaseTransport, instance: Instance
    ) -> EngineCapabilities:
        status, body = await self._get(transport, instance, "/v1/models")
        if status >= 500:
            raise ProbeInvalid(f"answers /v1/models with status {status}")
        if status == _UNAUTHORIZED:
            raise ProbeInvalid(f"wants another API key ({_KEY_SETTINGS[instance.pool]})")
        facts = EngineCapabilities()
        if status == 200:
            facts = facts_of_models(_read(body, _ModelCards).data)
        status, body = await self._get(transport, instance, "/version")
        return replace(facts, version=_read(body, _Version).version) if status == 200 else facts

    async def _get(
        self,
        transport: httpx.AsyncBaseTransport,
        instance: Instance,
        path: str,
        *,
        bare: bool = False,
    ) -> tuple[int, bytes]:
        with self._failures(instance, path, self._timeout_s):
            async with (
                FairTimeout(self._timeout_s),
                aclosing(
                    await transport.handle_async_request(self._request(instance, path, bare=bare))
                ) as response,
            ):
                _check_coding(response, path)
                if VERSION_HEADER in response.headers:
                    raise ProbeOfRouter("is a router, not an engine: name the engines themselves")
                too_long = ProbeInvalid(f"answers {path} without end")
                return response.status_code, await read_bounded(
                    response.aiter_bytes(), _MOST_BYTES, too_long
                )

    def _request(self, instance: Instance, path: str, *, bare: bool = False) -> httpx.Request:
        headers = [*_HEADERS, *(() if bare else self._headers(instance.pool))]
        return httpx.Request("GET", instance.address.url + path, headers=headers)

    @contextmanager
    def _failures(self, instance: Instance, path: str, patience_s: float) -> Generator[None]:
        """Say ProbeFailed where the libraries say what has failed."""
        try:
            yield
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise ProbeFailed(f"does not answer {path} within {patience_s:g} s") from exc
        except httpx.ConnectError as exc:
            if (lack := _lack(exc)) is not None:
                raise ProbeNotMade(f"was not asked: {lack.strerror}") from exc
            if any(isinstance(cause, NotAllowed) for cause in causes(exc)):
                raise ProbeFailed("is not where engines may be added (allowed_instances)") from exc
            if (why := self._tls.failure(instance, exc)) is not None:
                raise ProbeInvalid(why) from exc  # something is there that takes connections
            raise ProbeFailed(f"cannot be reached: {_why_unreached(exc)}") from exc
        except httpx.HTTPError as exc:
            if (why := self._tls.failure(instance, exc, was_open=True)) is not None:
                raise ProbeInvalid(why) from exc
            hint = ", over TLS: it may want a certificate of the router (engine_cert)"
            reason = hint if instance.address.scheme == "https" else ""
            raise ProbeFailed(f"breaks off when asked for {path}{reason}") from exc


def _lack(error: BaseException) -> OSError | None:
    """Return what the router lacked, which libraries hide behind errors of theirs."""
    for cause in causes(error):
        if isinstance(cause, OSError) and is_lack(cause.errno):
            return cause
    return None


def _check_coding(response: httpx.Response, path: str) -> None:
    """Refuse a compressed body: 300 KB of gzip can be as many MB (RFC 9110, 8.4)."""
    coding = str(response.headers.get("content-encoding", "")).strip().lower()
    if coding not in ("", "identity"):
        raise ProbeInvalid(f"answers {path} with a content coding, and none was asked for")


def _why_unreached(error: BaseException) -> str:
    """Return in words why no connection was made, without the address: clients read it."""
    for cause in causes(error):
        if isinstance(cause, socket.gaierror):
            return "its name does not resolve"
        if isinstance(cause, ConnectionRefusedError) or _REFUSED in str(cause):
            return "the connection is refused: nothing listens there"
        if isinstance(cause, TimeoutError):
            return "the connection timed out"
        if isinstance(cause, OSError) and cause.errno in _NO_ROUTE:
            return "its network or host is unreachable"
    return "no connection was made"


def _read(body: bytes, wanted: type[T]) -> T:
    try:
        return decode(body, wanted)
    except NotJson as exc:
        raise ProbeInvalid(f"answers something else than vLLM does: {exc}") from exc
