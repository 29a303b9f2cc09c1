"""Checks requests: refuses them while the router ends, without a key if keys are wanted, or else
from web sites.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdrelay_proxy.api.endpoint_routes import is_endpoint
from pdrelay_proxy.api.exception_handlers import response_to
from pdrelay_proxy.core.admission.keys import Keyring
from pdrelay_proxy.core.admission.lifetime import Lifetime, Stage, cut_short
from pdrelay_proxy.core.http.origins import Sites
from pdrelay_proxy.core.model import Headers
from pdrelay_proxy.core.protocol.error_shapes import is_for_operators
from pdrelay_proxy.errors import ClosingDown, CrossSite, Misdirected, Unauthorized

# For probes, onlookers and operators, whose routes check keys themselves. All other paths need a
# client's key.
_OPEN: Final = frozenset(
    {
        "/",
        "/metrics",
        "/stats",
        "/docs",
        "/openapi.json",
        "/health",
        "/live",
        "/liveness",
        "/ready",
        "/readiness",
    }
)


class AuthMiddleware:
    """ASGI middleware. While the router ends, it closes connections behind their answers."""

    def __init__(self, app: ASGIApp, *, lifetime: Lifetime, keyring: Keyring, sites: Sites) -> None:
        self._app = app
        self._lifetime = lifetime
        self._keyring = keyring
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it here."""
        if scope["type"] != "http" or is_endpoint(scope):
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # servers leave out the body themselves (ASGI, HTTP: "send")
            scope = {**scope, "method": "GET"}
        headers: Headers = tuple(scope["headers"])
        for_all = is_open(scope["path"].rstrip("/") or "/")
        answer = _ObservedSend(send, self._lifetime)
        try:
            self._sites.check(scope["method"], headers, has_keys=self._keyring.keys is not None)
            if not for_all:
                self._lifetime.check()
                self._keyring.caller(headers)
        except (ClosingDown, CrossSite, Misdirected, Unauthorized) as error:
            await response_to(error, scope)(scope, receive, answer)
            return
        if for_all:
            # it hung up, or was too slow: no client is left to answer
            with suppress(ClientDisconnect):
                await self._app(scope, receive, send)
            return
        with self._lifetime.serving():
            try:
                await self._app(scope, receive, answer)
            except asyncio.CancelledError:
                if self._lifetime.stage is not Stage.CLOSED:
                    raise
                # The server cancels requests that took too long to finish, and ignores what they
                # raise.
                if answer.start is None:  # otherwise half an answer has been sent
                    await response_to(cut_short(), scope)(scope, receive, send)


@dataclass(slots=True)
class _ObservedSend:
    """Keeps the beginning of an answer, in case it must be cut off.

    While the router ends, it makes clients open another connection, to another router, for the next
    request.
    """

    send: Send
    lifetime: Lifetime
    start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            if self.lifetime.stage is not Stage.SERVING:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await self.send(message)


def is_open(path: str) -> bool:
    """Return whether a path is served until the end, to callers that pass its route's check."""
    return path in _OPEN or is_for_operators(path)
