"""What a client sends: the body, counted while it is read, and the headers that engines may see."""

from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from xpyd_proxy.core.model import Headers, first_header
from xpyd_proxy.requests.intake import PASSED_ON, check_json, check_length, check_size

_PART: Final = 64 * 1024  # bytes


def passed_on(scope: Scope) -> Headers:
    """Return the headers that go to the engines, as they came."""
    headers: Headers = tuple(scope["headers"])  # ASGI: names are in lower case
    return tuple((name, value) for name, value in headers if name in PASSED_ON)


def require_json(scope: Scope) -> None:
    """Accept a body that is declared as JSON, or not declared at all; raises UnsupportedMedia."""
    check_json(_header(scope, b"content-type"))


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """Read at most ``limit`` bytes; raises BodyTooLarge, or ClientDisconnect: it hung up before the end."""
    check_length(_header(scope, b"content-length"), limit)
    parts: list[bytes] = []
    try:
        return await _collect(receive, parts, limit)
    except BaseException:
        parts.clear()  # the error's traceback keeps the frame, and so the bytes, until the garbage collector comes by
        raise


async def _collect(receive: Receive, parts: list[bytes], limit: int) -> bytes:
    """Read a body into parts of some size: one that grows piece by piece is moved again and again, and leaves holes."""
    size, last = 0, bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body: bytes = message.get("body", b"")
        size += len(body)
        check_size(size, limit)
        if not message.get("more_body", False):
            return b"".join((*parts, last, body)) if parts or last else body
        last += body
        if len(last) >= _PART:
            parts.append(bytes(last))
            last.clear()


def _header(scope: Scope, name: bytes) -> bytes:
    return first_header(tuple(scope["headers"]), name) or b""
