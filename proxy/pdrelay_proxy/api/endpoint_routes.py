"""The routes of all endpoints: signatures describe them, api/endpoint_asgi.py serves them.

A signature describes a path's parameters; it is never called. FastAPI would read a body whole and
check it before a handler runs, while these bodies are charged piece by piece and passed on
unchanged. Under uvicorn most requests do not come here either: api/guarded.py takes them from the
connection.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from functools import cache
from typing import Annotated, Any, Final, TypeAlias

from fastapi import Header, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from pdrelay_proxy.api.endpoint_document import ENDPOINT_TEXTS, EndpointText
from pdrelay_proxy.api.error_answers import ANY_ROUTE, PLACE, error_answers
from pdrelay_proxy.api.schemas import (
    AnthropicErrorResponse,
    ErrorResponse,
    ForwardedHeaders,
    MessagesRequest,
    ResponsesRequest,
    TokensRequest,
)
from pdrelay_proxy.api.text_schemas import VLLM
from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind

Part: TypeAlias = dict[str, Any]  # of an OpenAPI document
_NOT_FOUND: Final[tuple[Match, Scope]] = (Match.NONE, {})
_Headers: TypeAlias = Annotated[ForwardedHeaders, Header()]

# Either is enough: a document has two entries in ``security`` for that.
CLIENT_KEYS: Final[tuple[Any, ...]] = (
    Security(HTTPBearer(scheme_name="bearer", description="A key of a client", auto_error=False)),
    Security(
        APIKeyHeader(
            name="X-Api-Key", scheme_name="key", description="A key of a client", auto_error=False
        )
    ),
)
_ERRORS: Final[Mapping[int | str, str]] = {
    400: "The request is not one that the router or an engine takes",
    401: "No API key, or one that the router does not know",
    403: "A browser sent it on behalf of another web site, to a router that wants no keys",
    404: "No engine serves this model",
    408: "The request was not complete in time",
    413: "The body is larger than the router takes",
    415: "The body is of another type",
    429: "The key has too many requests, or too many a second, or the router is full (overload_status)",
    502: "An engine failed, and so did the other tries",
    503: "No engine can take the request, or the router is full or about to end; see Retry-After",
    504: "An engine, or the request as a whole, took too long",
    "4XX": "An engine refused the request; its answer as it came",
    **ANY_ROUTE,
}
_ABOUT_TEXT: Final = (
    f"The fields are those of vLLM {VLLM}. Others go to the engines as they came, but for "
    f"kv_transfer_params, "
    "ec_transfer_params and chat_template, which are a 400. With stream=true the answer is a "
    "stream of events."
)
_TEXT: Final[Part] = {"schema": {"type": "string"}}
_ANSWER_HEADERS: Final[Part] = {
    "X-Request-Id": {"description": "The router's name of the request", **_TEXT},
    "Server-Timing": {"description": "The engines it went to, and their milliseconds", **_TEXT},
}
_FORM: Final[Part] = {
    "type": "object",
    "properties": {"file": {"type": "string", "contentMediaType": "application/octet-stream"}},
    "required": ["file"],
    "additionalProperties": True,
}


async def _text(headers: _Headers) -> None:
    """Complete a text, or answer in a chat."""


async def _responses(body: ResponsesRequest, headers: _Headers) -> None:
    """Answer, in the Responses API."""


async def _messages(body: MessagesRequest, headers: _Headers) -> None:
    """Answer, in the Messages API."""


async def _generate(body: TokensRequest, headers: _Headers) -> None:
    """Go on with token ids, in vLLM's own API."""


async def _json(headers: _Headers) -> None:
    """One decode engine serves it; the body goes there as it is."""


async def _form(headers: _Headers) -> None:
    """One decode engine serves it; the form goes there as it is."""


_GENERATING: Final[Mapping[str, Callable[..., Awaitable[None]]]] = {
    Api.COMPLETIONS: _text,
    Api.CHAT: _text,
    Api.RESPONSES: _responses,
    Api.MESSAGES: _messages,
    Api.GENERATE: _generate,
}


class EndpointRoute(APIRoute):
    """A path that an ASGI application serves; its signature only describes it."""

    def __init__(
        self,
        path: str,
        signature: Callable[..., Awaitable[None]],
        **described: Any,  # noqa: ANN401 (what FastAPI takes)
    ) -> None:
        super().__init__(path, signature, methods=["POST"], response_model=None, **described)

    def served_by(self, application: ASGIApp) -> "EndpointRoute":
        """Return this route with an application."""
        route = copy(self)
        route.app = application
        return route

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the path is exactly this one: an ordinary route's regular expression
        allows a line break behind it.
        """
        return super().matches(scope) if scope.get("path") == self.path else _NOT_FOUND


def endpoint_routes(endpoints: ASGIApp, *, keys: tuple[Any, ...] = ()) -> list[EndpointRoute]:
    """Build the routes of all paths in the table; ``keys``: CLIENT_KEYS, if clients need one."""
    return [_described(path, kind, keys).served_by(endpoints) for path, kind in ENDPOINTS.items()]


def is_endpoint(scope: Scope) -> bool:
    """Return whether a request is for an endpoint, which records itself."""
    return scope["path"] in ENDPOINTS and scope["method"] == "POST"


def operation_id(route: APIRoute) -> str:
    """Return the operation id: an endpoint's own, or a route's method and path."""
    if route.path in ENDPOINT_TEXTS:
        return ENDPOINT_TEXTS[route.path].operation
    words = re.findall(r"[a-z0-9]+", route.path_format.lower()) or ["status_page"]
    return "_".join([*sorted(route.methods), *words]).lower()


@cache
def _described(path: str, kind: EndpointKind, keys: tuple[Any, ...]) -> EndpointRoute:
    """Return the described route, cached: FastAPI takes a millisecond to analyse its signature."""
    text = ENDPOINT_TEXTS[path]
    signature = _GENERATING.get(path, _form if kind is EndpointKind.FORM else _json)
    content: Part = {"application/json": {"schema": {"$ref": PLACE + text.answer}}}
    if kind is EndpointKind.SPLIT:
        content["text/event-stream"] = _events(text)
    answers: dict[int | str, Part] = {
        200: {
            "description": "The engine's answer, as it is",
            "headers": _ANSWER_HEADERS,
            "content": content,
        }
    }
    is_messages = path.startswith(Api.MESSAGES.value)
    answers |= error_answers(AnthropicErrorResponse if is_messages else ErrorResponse, _ERRORS)
    return EndpointRoute(
        path,
        signature,
        summary=text.summary,
        description=_ABOUT_TEXT if text.event else None,
        tags=["two legs" if kind is EndpointKind.SPLIT else "one leg"],
        responses=answers,
        dependencies=keys,
        openapi_extra={"requestBody": _body(text, kind)}
        if text.request or kind is EndpointKind.FORM
        else None,
        generate_unique_id_function=operation_id,
    )


def _body(text: EndpointText, kind: EndpointKind) -> Part:
    if kind is EndpointKind.FORM:
        return {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    media: Part = {"schema": {"$ref": PLACE + text.request}}
    if text.event and text.example is not None:
        streamed = text.example | {"stream": True, "stream_options": {"include_usage": True}}
        media["examples"] = {
            "whole": {"summary": "An answer as a whole", "value": text.example},
            "stream": {"summary": "A stream", "value": streamed},
        }
    elif text.example is not None:
        media["example"] = text.example
    return {"required": True, "content": {"application/json": media}}


def _events(text: EndpointText) -> Part:
    """Return the schema of events; generators for OpenAPI 3.1 refuse ``itemSchema`` of 3.2."""
    data: Part = {"type": "string"}
    if text.event:
        event_schema: Part = {
            "anyOf": [{"$ref": PLACE + text.event}, {"$ref": PLACE + ErrorResponse.__name__}]
        }
        data_schema: Part = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": event_schema,
        }
        data = {"anyOf": [data_schema, {"const": "[DONE]", "description": "The last event"}]}
    fields: Part = {"event": {"type": "string"}, "data": data}
    return {
        "schema": {
            "type": "object",
            "description": "One event",
            "properties": fields,
            "required": ["data"],
        }
    }
