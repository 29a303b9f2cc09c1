"""Errors as clients see them: the one place where an exception becomes a status and an OpenAI-shaped body."""

from typing import Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xpyd_proxy.api.tracking import id_headers, note_fault
from xpyd_proxy.errors import (
    BadRequest,
    BodyTooLarge,
    CrossSite,
    EngineBusy,
    EngineError,
    EngineTimeout,
    HeadTooLarge,
    KeyOverLimit,
    Misdirected,
    NoInstance,
    NotServed,
    OutOfTime,
    ProxyError,
    Refused,
    TooSlow,
    TurnedAway,
    Unauthorized,
    UnknownModel,
    UnsupportedMedia,
    UriTooLong,
)

_ADMIN_PATHS: Final = frozenset({"/status"})

# Looked up along the class's bases: an error of its own kind, or that of its parent.
_KINDS: Final[dict[type[Exception], tuple[int, str]]] = {
    BadRequest: (400, "BadRequestError"),
    HeadTooLarge: (431, "RequestHeadTooLargeError"),
    UriTooLong: (414, "UriTooLongError"),
    NotServed: (501, "NotImplementedError"),
    TooSlow: (408, "RequestTimeoutError"),
    BodyTooLarge: (413, "RequestTooLargeError"),
    UnsupportedMedia: (415, "UnsupportedMediaTypeError"),
    Misdirected: (421, "MisdirectedRequestError"),
    CrossSite: (403, "PermissionDeniedError"),
    UnknownModel: (404, "NotFoundError"),
    Unauthorized: (401, "AuthenticationError"),
    KeyOverLimit: (429, "RateLimitError"),
    TurnedAway: (503, "ServiceUnavailableError"),
    NoInstance: (503, "ServiceUnavailableError"),
    OutOfTime: (504, "RequestTimeoutError"),
    EngineError: (502, "EngineError"),
    EngineTimeout: (504, "EngineTimeoutError"),
    EngineBusy: (503, "ServiceUnavailableError"),
    Exception: (500, "InternalServerError"),
}
_HTTP_TYPES: Final = {404: "NotFoundError", 405: "MethodNotAllowedError"}


def install(app: FastAPI) -> None:
    """Give an application our error answers."""
    app.add_exception_handler(ProxyError, _on_proxy_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


class _Noting:
    """Passes an answer on, and knows whether it has begun."""

    __slots__ = ("_send", "begun")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


class Answering:
    """ASGI middleware for an application that FastAPI's handlers do not surround: the same errors, the same answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for what goes wrong before there is an answer; what goes wrong later is the server's to cut off."""
        noting = _Noting(send)
        try:
            await self._app(scope, receive, noting)
        except ProxyError as error:
            if noting.begun:
                raise
            await response_to(error, scope)(scope, receive, send)


class LastResort:
    """ASGI middleware around all others: answers for a bug, and lets the server log it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, and answer 500 for what should not have happened, if nothing has been answered yet."""
        noting = _Noting(send)
        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if not noting.begun:
                await _response_to_a_bug(error, scope)(scope, receive, send)
            raise


def error_body(error: Exception) -> tuple[int, bytes]:
    """Return the status and the body of an error; the text of a bug stays in the log."""
    status, kind = next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)
    message = str(error) if isinstance(error, ProxyError) else "The router failed; its log says why."
    param = error.param if isinstance(error, BadRequest) else None
    return status, _openai(status, kind, message, param)


def _openai(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def response_to(error: Exception, scope: Scope) -> Response:
    """Return the whole answer to an error, and note it in the request's line of the log."""
    note_fault(scope, error)
    error.with_traceback(None)  # it leads to frames that hold the request, and the error: a circle
    if isinstance(error, Refused):
        return Response(error.body, error.status, {"content-type": error.content_type})
    status, body = error_body(error)
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, TurnedAway) else {}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = error.asks
    return Response(body, status, headers, media_type="application/json")


async def _on_proxy_error(request: Request, error: Exception) -> Response:
    return response_to(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer for a path or a method that does not exist; the admin routes speak FastAPI's own format."""
    assert isinstance(error, HTTPException)
    if request.url.path in _ADMIN_PATHS or request.url.path.startswith("/instances"):
        return await http_exception_handler(request, error)
    kind = _HTTP_TYPES.get(error.status_code, "BadRequestError")
    body = _openai(error.status_code, kind, f"{request.method} {request.url.path}: {error.detail}")
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer for what should not have happened, from outside of Tracking; the server logs the traceback."""
    return _response_to_a_bug(error, request.scope)


def _response_to_a_bug(error: Exception, scope: Scope) -> Response:
    status, body = error_body(error)
    return Response(body, status, id_headers(scope), media_type="application/json")
