"""Errors as clients see them: the one place where an exception becomes a status and a body in its
API's shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.http.content_codings import READ
from pdrelay_proxy.core.protocol.engine_errors import words_of
from pdrelay_proxy.core.protocol.error_shapes import engine_text, error_event, error_text
from pdrelay_proxy.errors import (
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
    PathNotServed,
    ProxyError,
    Refused,
    RouterFull,
    RouterLacks,
    TooManyConnections,
    TooSlow,
    TurnedAway,
    Unauthorized,
    UnknownModel,
    UnsupportedCoding,
    UnsupportedMedia,
    UriTooLong,
)
from pdrelay_proxy.settings import OverloadStatus

JSON: Final = "application/json"
_TOO_MANY: Final = (429, "RateLimitError")
_OVERLOADS: Final = (RouterFull, TooManyConnections, EngineBusy)
_RETRY_AFTER_S: Final = 1  # of engines that have no room, and do not say for how long
_MODEL: Final = "model"  # the field of a request that names one that no engine serves
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
    PathNotServed: (404, "NotFoundError"),
    UnknownModel: (404, "NotFoundError"),
    Unauthorized: (401, "AuthenticationError"),
    KeyOverLimit: (429, "RateLimitError"),
    TurnedAway: (503, "ServiceUnavailableError"),
    NoInstance: (503, "ServiceUnavailableError"),
    OutOfTime: (504, "RequestTimeoutError"),
    EngineError: (502, "EngineError"),
    EngineTimeout: (504, "EngineTimeoutError"),
    EngineBusy: (503, "ServiceUnavailableError"),
    RouterLacks: (503, "ServiceUnavailableError"),
    Exception: (500, "InternalServerError"),
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The answer to an error."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str]  # beside those that each answer has

    def header_lines(self) -> bytes:
        """Return the headers as lines of a head."""
        lines = [f"{name}: {value}\r\n" for name, value in self.headers.items()]
        return "".join(lines).encode("latin-1")


def error_answer(
    error: Exception, path: str, overload: OverloadStatus = OverloadStatus.SERVICE_UNAVAILABLE
) -> ErrorAnswer:
    """Return the answer to an error; the text of a bug stays in the log.

    An engine's own words stay as they are if they have the shape of the path's API.
    """
    headers = _headers(error, overload)
    if isinstance(error, Refused):
        body = engine_text(path, error.status, error.body)
        content_type = error.content_type if body is error.body else JSON
        return ErrorAnswer(error.status, content_type, body, headers)
    status, kind = _TOO_MANY if _is_told_to_wait(error, overload) else _kind(error)
    body = error_text(path, status, _sentence(error), kind=kind, param=_param(error))
    return ErrorAnswer(status, JSON, body, headers)


def last_event(error: Exception, path: str) -> bytes:
    """Return the event that says in the API's words that a stream has failed."""
    if isinstance(error, Refused):  # its status comes too late
        words = words_of(error.body) or str(error)
        return b"\n" + error_event(path, error.status, words)
    status, kind = _kind(error)
    event = error_event(path, status, _sentence(error), kind=kind, param=_param(error))
    return b"\n" + event  # the empty line closes an event that lacks its own


def _headers(error: Exception, overload: OverloadStatus) -> Mapping[str, str]:
    if isinstance(error, (TurnedAway, NoInstance)) and error.retry_after_s is not None:
        return {"retry-after": str(error.retry_after_s)}
    if _is_told_to_wait(error, overload):
        return {"retry-after": str(_RETRY_AFTER_S)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": error.asks}
    if isinstance(error, UnsupportedCoding):
        return {"accept-encoding": READ}
    return {}


def _is_told_to_wait(error: Exception, overload: OverloadStatus) -> bool:
    return overload is OverloadStatus.TOO_MANY_REQUESTS and isinstance(error, _OVERLOADS)


def _kind(error: Exception) -> tuple[int, str]:
    return next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, ProxyError) else "The router failed; its log says why."


def _param(error: Exception) -> str | None:
    return (
        error.param
        if isinstance(error, BadRequest)
        else _MODEL
        if isinstance(error, UnknownModel)
        else None
    )
