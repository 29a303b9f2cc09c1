"""The error answers of routes that FastAPI serves."""

from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from pdrelay_proxy.api.request_context import id_headers, note_fault
from pdrelay_proxy.core.protocol.error_shapes import error_text, is_for_operators
from pdrelay_proxy.errors import ProxyError, forget_frames
from pdrelay_proxy.requests.error_body import JSON, error_answer


def install(app: FastAPI) -> None:
    """Install the router's error answers in an application."""
    app.add_exception_handler(ProxyError, _on_proxy_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


def response_to(error: Exception, scope: Scope) -> Response:
    """Return the whole answer to an error, and note the error in the request's log line."""
    note_fault(scope, error)
    forget_frames(error)
    answer = error_answer(error, scope["path"])
    headers = {"content-type": answer.content_type, **answer.headers}
    return Response(answer.body, answer.status, headers)


async def _on_proxy_error(request: Request, error: Exception) -> Response:
    return response_to(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer for an unknown path or method; the admin routes use FastAPI's own format."""
    assert isinstance(error, HTTPException)
    is_unknown = error.status_code == 404 and "endpoint" not in request.scope  # else a route's own
    if is_unknown and (location := _without_slash(request)) is not None:
        return Response(status_code=307, headers={"location": location})
    if is_for_operators(request.url.path):
        return await http_exception_handler(request, error)
    path = request.url.path
    body = error_text(path, error.status_code, f"{request.method} {path}: {error.detail}")
    return Response(body, error.status_code, error.headers, media_type=JSON)


def _without_slash(request: Request) -> str | None:
    """Return a path without the slash at its end, if that is a route: FastAPI redirects there, and
    so does vLLM.

    The location has no host, which would be wrong behind a TLS proxy.
    """
    path = request.scope["path"].rstrip("/")
    if not path or path == request.scope["path"]:
        return None
    without_slash = {**request.scope, "path": path}
    if all(route.matches(without_slash)[0] is Match.NONE for route in request.app.routes):
        return None
    query = request.scope["query_string"].decode("latin-1")
    return quote(path) + ("?" + query if query else "")


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer for a bug, outside of the middleware; the server logs the traceback."""
    answer = error_answer(error, request.url.path)
    headers = id_headers(request.scope)
    return Response(answer.body, answer.status, headers, media_type=answer.content_type)
