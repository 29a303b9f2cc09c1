"""Lets pages of allowed origins call the router: answers to preflights, and headers of FastAPI's
answers.

requests/client_response.py adds these headers to endpoints' answers. Routes for operators have
none.
"""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdrelay_proxy.api.endpoint_routes import is_endpoint
from pdrelay_proxy.api.exception_handlers import response_to
from pdrelay_proxy.core.http.allowed_origins import AllowedOrigins
from pdrelay_proxy.core.model import Headers, first_header
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_proxy.errors import CrossSite

_MODELS: Final = "/v1/models"


class CrossOriginMiddleware:
    """ASGI middleware, in front of the check of keys: a browser's preflight has none."""

    def __init__(self, app: ASGIApp, *, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or let a request pass and add headers to its answer."""
        path = scope.get("path", "")
        if (
            scope["type"] != "http"
            or not (path in ENDPOINTS or path == _MODELS)
            or is_endpoint(scope)
        ):
            await self._app(scope, receive, send)
            return
        headers: Headers = tuple(scope["headers"])
        origin = first_header(headers, b"origin")
        if (
            scope["method"] == "OPTIONS"
            and first_header(headers, b"access-control-request-method") is not None
        ):
            permission = self._origins.permission(
                headers, b"POST" if path in ENDPOINTS else b"GET, HEAD"
            )
            if permission is None:
                error = CrossSite(
                    "pages of this origin may not use this router: name it in allowed_origins"
                )
                await response_to(error, scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 204, "headers": [*permission]})
            await send({"type": "http.response.body", "body": b""})
            return
        added = self._origins.headers(origin)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, send_with_headers)
