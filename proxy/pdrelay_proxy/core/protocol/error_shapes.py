"""The shape of errors in each API.

The path of a request decides the API, wherever the error comes from.

Most paths use OpenAI's shape, also the Responses API until its stream has begun. Clients of the
Messages API read Anthropic's shape alone. Routes for operators answer as FastAPI does, like vLLM's
demo router.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.raw_json import NULL, Fields, maybe

_MESSAGES: Final = Api.MESSAGES.value
_BELOW_MESSAGES: Final = _MESSAGES + "/"
# https://docs.anthropic.com/en/api/errors. 529 is Anthropic's own status: 503 says the same.
_ANTHROPIC_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENAI_KINDS: Final[Mapping[int, str]] = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
}
_WORDS_MOST: Final = 2000  # characters of an engine's message that are put into another shape


def is_for_operators(path: str) -> bool:
    """Return whether a path checks the operator's key itself, and answers as FastAPI does."""
    return path in ("/status", "/instances", "/pairs") or path.startswith(
        ("/instances/", "/requests/")
    )


def error_text(
    path: str, status: int, message: str, *, kind: str = "", param: str | None = None
) -> bytes:
    """Return the body of an error; ``kind``: its type for OpenAI's clients, if the status is not
    specific enough.
    """
    if _is_anthropic(path):
        return msgspec.json.encode(_anthropic(status, message))
    if is_for_operators(path):
        return msgspec.json.encode({"detail": message})
    kind = kind or openai_kind(status)
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}
    )


def error_event(
    path: str, status: int, message: str, *, kind: str = "", param: str | None = None
) -> bytes:
    """Return the event that reports a stream's failure to a client's library."""
    write = _EVENTS.get(path)
    if write is not None:
        return (
            b"event: error\ndata: "
            + msgspec.json.encode(write(status, message, kind or openai_kind(status)))
            + b"\n\n"
        )
    return b"data: " + error_text(path, status, message, kind=kind, param=param) + b"\n\n"


def engine_text(path: str, status: int, body: bytes) -> bytes:
    """Return an engine's error in the shape of the path's API, unchanged if it has that shape."""
    fields = maybe(body, Fields) or {}
    error = maybe(fields.get("error", NULL), Fields)
    message = None if error is None else maybe(error.get("message", NULL), str)
    if error is not None and message is not None:
        is_anthropic = (
            fields.get("type") == _ERROR and maybe(error.get("type", NULL), str) is not None
        )
        if is_anthropic if _is_anthropic(path) else not is_anthropic:
            return body
        kind = maybe(error.get("type", NULL), str)
        return error_text(
            path, status, message, kind=kind or "", param=maybe(error.get("param", NULL), str)
        )
    message_text = _words(fields) or f"an engine refused the request with status {status}"
    return error_text(path, status, message_text[:_WORDS_MOST])


def openai_kind(status: int) -> str:
    """Return vLLM's name for an error of this status."""
    return _OPENAI_KINDS.get(status) or (
        "BadRequestError" if status < 500 else "InternalServerError"
    )


def _is_anthropic(path: str) -> bool:
    return path == _MESSAGES or path.startswith(_BELOW_MESSAGES)


def _anthropic(status: int, message: str, _: str = "") -> dict[str, object]:
    kind = _ANTHROPIC_KINDS.get(status) or (
        "invalid_request_error" if status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": message}}


def _of_responses(_: int, message: str, kind: str) -> dict[str, object]:
    return {"type": "error", "code": kind, "message": message, "param": None}


def _words(fields: Fields) -> str | None:
    """Return the message in another shape: vLLM's 401, an older vLLM's error, FastAPI's own."""
    for name in ("error", "message", "detail"):
        text = maybe(fields.get(name, NULL), str)
        if text is not None:
            return text
    details = maybe(fields.get("detail", NULL), list[Fields])
    first = details[0] if details else {}
    text = maybe(first.get("msg", NULL), str)
    location = maybe(first.get("loc", NULL), list[str | int])
    return f"{'.'.join(map(str, location))}: {text}" if text is not None and location else text


_ERROR: Final = msgspec.Raw(b'"error"')
_EVENTS: Final[Mapping[str, Callable[[int, str, str], dict[str, object]]]] = {
    Api.RESPONSES.value: _of_responses,
    Api.MESSAGES.value: _anthropic,
}
