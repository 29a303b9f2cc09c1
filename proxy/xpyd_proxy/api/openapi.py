"""What the router serves, as an OpenAPI document: the paths that FastAPI knows, and those that are served past it.

The routes of the table in ``core/protocol/endpoints.py`` are ASGI applications, and most are not even that: no
framework can look into them. So what stands here about them is written by hand, and as short as it can be: bodies are
the engine's business, and only the fields that the router itself looks at are named.
"""

import hmac
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final, TypeAlias, cast

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from xpyd_proxy.api.door import LOOKS, is_open
from xpyd_proxy.core.admission.keys import Keyring
from xpyd_proxy.core.model import Api
from xpyd_proxy.core.protocol.endpoints import ENDPOINTS, Kind

Part: TypeAlias = dict[str, Any]  # of a JSON document

PATH: Final = "/openapi.json"
_ABOUT: Final = (
    "A router for vLLM engines that prefill and engines that decode. Bodies go to the engines as they are: fields that "
    "are not named here are the engine's to accept or to refuse."
)
_OPERATORS: Final = ("/instances", "/status")  # paths that want the operator's key begin so; /status.json is open

# Fields that the router looks at, or the engines need.
_COUNT: Final[Part] = {"type": "integer"}
_TEXTS: Final[Part] = {"oneOf": [{"type": "string"}, {"type": "array"}]}
_COMMON: Final[Part] = {"model": {"type": "string"}, "stream": {"type": "boolean", "default": False}}
_WANTED: Final[Mapping[str, tuple[str, tuple[str, ...], Part]]] = {
    Api.COMPLETIONS: ("Complete a text", ("prompt",), {"prompt": _TEXTS, "max_tokens": _COUNT, "n": _COUNT}),
    Api.CHAT: (
        "Answer in a chat",
        ("messages",),
        {"messages": {"type": "array", "items": {"type": "object"}}, "max_completion_tokens": _COUNT, "n": _COUNT},
    ),
    Api.RESPONSES: ("Answer, in the Responses API", ("input",), {"input": _TEXTS, "max_output_tokens": _COUNT}),
    Api.MESSAGES: (
        "Answer, in the Messages API",
        ("messages", "max_tokens"),
        {"messages": {"type": "array", "items": {"type": "object"}}, "max_tokens": _COUNT},
    ),
}
_HEADERS: Final[tuple[tuple[str, str], ...]] = (
    ("X-Request-Id", "the client's name of the request; the answer and the log repeat it"),
    ("X-Session-ID", "requests with the same one go to the same engine, where the policy is session"),
    ("X-data-parallel-rank", "the data-parallel rank of the engine that decodes"),
    ("X-vLLM-Priority", "requests with a lower one come first where some have to wait"),
)
_ERRORS: Final[Mapping[int, str]] = {
    400: "The request is not one that the router or an engine takes",
    401: "No API key, or one that the router does not know",
    404: "No engine serves this model",
    413: "The body is larger than the router takes",
    415: "The body is of another type",
    429: "The key has too many requests, or too many a second",
    500: "The router failed",
    502: "An engine failed, and so did the other tries",
    503: "No engine can take the request, or the router is full or about to end; see Retry-After",
    504: "An engine, or the request as a whole, took too long",
}
_ANSWER_HEADERS: Final[Part] = {
    "X-Request-Id": {"description": "The router's name of the request", "schema": {"type": "string"}},
    "Server-Timing": {"description": "The engines it went to, and their milliseconds", "schema": {"type": "string"}},
}
_SCHEMAS: Final[Part] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"], "description": "The field of the body that is wrong"},
                    "code": {"type": "integer", "description": "The status"},
                },
            }
        },
    }
}
_SCHEMES: Final[Part] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of a client"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "A key of a client"},
}
_OPERATORS_SCHEME: Final[Part] = {
    "operator": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "The operator's key"}
}


def openapi_routes(app: FastAPI, admin_key: str | None, keyring: Keyring, *, open_metrics: bool = False) -> APIRouter:
    """Build the route of the document. What is for operators is in it for those who show their key."""
    router = APIRouter()
    made: dict[tuple[bool, bool], bytes] = {}  # the routes do not change while the router runs

    @router.get(PATH, include_in_schema=False)
    async def document(request: Request) -> Response:
        shown = request.headers.get("x-api-key", "").encode("latin-1")
        which = keyring.keys is not None, bool(admin_key) and hmac.compare_digest(shown, (admin_key or "").encode())
        if which not in made:
            made[which] = msgspec.json.encode(
                described(app, keys=which[0], operators=which[1], open_metrics=open_metrics)
            )
        return Response(made[which], headers={"cache-control": "no-store"}, media_type="application/json")

    return router


def described(app: FastAPI, *, keys: bool, operators: bool, open_metrics: bool = False) -> Part:
    """Return the document; ``keys``: clients must show one; ``operators``: with the routes that are for them."""
    found = get_openapi(title="xpyd", version=version("xpyd"), description=_ABOUT, routes=app.routes)
    paths: Part = {path: item for path, item in found.get("paths", {}).items() if operators or not _is_theirs(path)}
    for path, kind in ENDPOINTS.items():
        paths[path] = {"post": _operation(path, kind)}
    for path, method, operation in _operations(paths):
        operation["operationId"] = f"{method}{path.replace('/', '_').replace('.', '_')}"
        if _is_theirs(path):
            operation["security"] = [{"operator": []}]
        elif keys and (not is_open(path) or (path in LOOKS and not open_metrics)):
            operation["security"] = [{"bearer": []}, {"key": []}]
    found["paths"] = paths
    components = found.setdefault("components", {})
    components["schemas"] = components.get("schemas", {}) | _SCHEMAS
    components["securitySchemes"] = _SCHEMES | (_OPERATORS_SCHEME if operators else {})
    if not operators:  # FastAPI's own error is theirs alone
        components["schemas"] = dict(_SCHEMAS)
    return found


def _is_theirs(path: str) -> bool:
    return path in _OPERATORS or path.startswith("/instances/")


def _operations(paths: Part) -> Iterator[tuple[str, str, Part]]:
    for path, item in paths.items():
        for method, operation in cast("Part", item).items():
            yield path, method, operation


def _operation(path: str, kind: Kind) -> Part:
    plain: tuple[str, tuple[str, ...], Part] = (_SUMMARIES[kind], (), {})
    summary, required, fields = _WANTED.get(path, plain)
    answers: Part = {"200": _good(kind)}
    answers |= {str(status): _bad(text) for status, text in _ERRORS.items()}
    return {
        "summary": summary,
        "tags": [_TAGS[kind]],
        "parameters": [_header(name, text) for name, text in _HEADERS],
        "requestBody": {"required": True, "content": _content(kind, required, fields)},
        "responses": answers,
    }


_TAGS: Final[Mapping[Kind, str]] = {Kind.SPLIT: "two legs", Kind.JSON: "one leg", Kind.FORM: "one leg"}
_SUMMARIES: Final[Mapping[Kind, str]] = {
    Kind.SPLIT: "Generate text",
    Kind.JSON: "One decode engine does it; the body goes there as it is",
    Kind.FORM: "One decode engine does it; the form goes there as it is",
}


def _content(kind: Kind, required: tuple[str, ...], fields: Part) -> Part:
    if kind is Kind.FORM:
        form: Part = {"file": {"type": "string", "contentMediaType": "application/octet-stream"}}
        return {"multipart/form-data": {"schema": {"type": "object", "properties": form, "required": ["file"]}}}
    body: Part = {"type": "object", "additionalProperties": True}
    properties = (_COMMON if kind is Kind.SPLIT else {"model": {"type": "string"}}) | fields
    return {"application/json": {"schema": body | {"properties": properties, "required": [*required]}}}


def _good(kind: Kind) -> Part:
    content: Part = {"application/json": {"schema": {}}}
    if kind is Kind.SPLIT:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "The engine's answer, as it is", "headers": _ANSWER_HEADERS, "content": content}


def _bad(text: str) -> Part:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _header(name: str, text: str) -> Part:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
