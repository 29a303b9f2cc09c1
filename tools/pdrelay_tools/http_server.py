"""A client of one server: sends requests, bounds answers, hangs up. httpx stops here."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Final, TypeAlias

import httpx
import msgspec

from pdrelay_tools.http_reply import Reply

# bytes of an answer, of which 32 may come at once; a larger one is cut off and reported
LARGEST_BODY: Final = 8 << 20
_DATA: Final = b"data:"
Transport: TypeAlias = httpx.AsyncClient  # that all servers of a run share


def open_transport(tls: ssl.SSLContext | None) -> Transport:
    """Return a client without proxies, redirects and kept connections: engines restart in a run."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if tls is None else tls
    return Transport(trust_env=False, timeout=None, limits=limits, verify=verify)


class HttpServer:
    """An engine or a router: its name in reports, and its URL."""

    def __init__(
        self,
        name: str,
        url: str,
        transport: Transport,
        key: str | None = None,
        *,
        server_name: str | None = None,
    ) -> None:
        """``server_name``: the name that its certificate must have; None: the host of its URL."""
        self.name = name
        self.url = url
        self._client = transport
        self._extensions = {} if server_name is None else {"sni_hostname": server_name}
        self._headers = {"accept-encoding": "identity"} | (
            {} if key is None else {"authorization": f"Bearer {key}"}
        )

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | bytes,
        *,
        timeout_s: float,
        request_id: str | None = None,
    ) -> Reply:
        """Post a body and read the whole answer; does not raise: errors are in the reply."""
        return await self._exchange("POST", path, body, timeout_s, request_id=request_id)

    async def get(self, path: str, *, timeout_s: float) -> Reply:
        """Get a path."""
        return await self._exchange("GET", path, b"", timeout_s)

    async def leave(
        self,
        path: str,
        body: Mapping[str, object],
        *,
        after_s: float,
        after_events: int | None = None,
        request_id: str | None = None,
    ) -> Reply:
        """Post a body and hang up after so many seconds, or as soon as so many events came."""
        return await self._exchange(
            "POST", path, body, after_s, after_events=after_events, request_id=request_id
        )

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | bytes,
        timeout_s: float,
        *,
        after_events: int | None = None,
        request_id: str | None = None,
    ) -> Reply:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = dict(self._headers)
        if method == "POST":
            headers["content-type"] = "application/json"
        if request_id is not None:
            headers["x-request-id"] = request_id
        sent_at = time.monotonic()
        received = bytearray()
        times = list[float]()
        status = None
        reason = ""
        is_late = False
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(
                    method,
                    self.url + path,
                    content=content,
                    headers=headers,
                    extensions=self._extensions,
                ) as response,
            ):
                status = response.status_code
                async for piece in response.aiter_raw():
                    received += piece
                    times += [time.monotonic()] * piece.count(_DATA)
                    if len(received) > LARGEST_BODY:
                        reason = f"{self.name} answered more than {LARGEST_BODY} bytes"
                        break
                    if after_events is not None and len(times) >= after_events:
                        reason = "hung up"
                        break
        except TimeoutError:
            reason = f"{self.name} gave no whole answer within {timeout_s:g} s"
            is_late = True
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            # UnicodeError: a name that is none
            reason = f"{self.name}: {str(exc) or type(exc).__name__}"
        return Reply(
            status,
            bytes(received),
            reason,
            is_late,
            sent_at,
            time.monotonic() - sent_at,
            tuple(times),
        )
