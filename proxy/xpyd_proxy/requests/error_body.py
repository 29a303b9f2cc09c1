"""Errors as clients see them: the one place where an exception becomes a status and an OpenAI-shaped body."""

from typing import Final

import msgspec

from xpyd_proxy.errors import (
    BadRequest,
    BodyTooLarge,
    ClassNotAllowed,
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
    TooSlow,
    TurnedAway,
    Unauthorized,
    UnknownModel,
    UnsupportedMedia,
    UriTooLong,
)

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
    ClassNotAllowed: (403, "PermissionDeniedError"),
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


def error_body(error: Exception) -> tuple[int, bytes]:
    """Return the status and the body of an error; the text of a bug stays in the log."""
    status, kind = next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)
    message = str(error) if isinstance(error, ProxyError) else "The router failed; its log says why."
    param = error.param if isinstance(error, BadRequest) else None
    return status, openai_error(status, kind, message, param)


def openai_error(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """Write an error as OpenAI's API does."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})
