"""What a client sends: the body, counted while it is read, and the headers that engines may see."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from xpyd_proxy.api.hot import LEAVING
from xpyd_proxy.core.model import Headers
from xpyd_proxy.errors import BadRequest, BodyTooLarge, UnsupportedMedia

_HEADERS: Final = "xpyd.headers"  # in a scope: its headers by name
# X-Request-Id is missing on purpose: engines match the halves of a request by it, so it must be ours and unique.
PASSED_ON: Final = frozenset({b"authorization", b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority"})


def passed_on(scope: Scope) -> Headers:
    """Return the headers that go to the engines, as they came."""
    headers: Headers = tuple(scope["headers"])  # ASGI: names are in lower case
    return tuple((name, value) for name, value in headers if name in PASSED_ON)


def require_json(scope: Scope) -> None:
    """Accept a body that is declared as JSON, or not declared at all.

    Raises:
        UnsupportedMedia: it is declared as something else.
    """
    declared = _header(scope, b"content-type")
    if declared and declared.partition(b";")[0].strip().lower() != b"application/json":
        raise UnsupportedMedia(f"the body must be application/json, not {declared.decode('latin-1')}")


def require_form(scope: Scope) -> bytes:
    """Accept a body that is declared as a form with files, and return the declaration: it says where the parts end.

    Raises:
        UnsupportedMedia: it is declared as something else, or not at all.
    """
    declared = _header(scope, b"content-type")
    if declared.partition(b";")[0].strip().lower() != b"multipart/form-data":
        raise UnsupportedMedia(
            f"the body must be multipart/form-data, not {declared.decode('latin-1') or 'undeclared'}"
        )
    return declared


def rank_of(scope: Scope) -> int | None:
    """Return the data-parallel rank that the client asks for, if it does.

    Raises:
        BadRequest: it is no whole number.
    """
    text = _header(scope, b"x-data-parallel-rank").strip()
    if not text:
        return None
    if text.isdigit() and len(text) < 10:
        return int(text)
    raise BadRequest(f"X-data-parallel-rank must be a whole number from 0 on, not {text.decode('latin-1')!r}")


_PART: Final = 64 * 1024  # bytes


class Holding(Protocol):
    """Where the bytes of a body are charged while it comes."""

    def grow(self, size: int, /) -> None:
        """Charge so many bytes more; raises TurnedAway if there are not as many left."""
        ...


async def read_body(scope: Scope, receive: Receive, *, limit: int, holding: Holding | None = None) -> bytes:
    """Read the body, never holding more bytes of it than the limit, and none that ``holding`` does not grant.

    Raises:
        BodyTooLarge: it is longer, or says so.
        ClientDisconnect: the client hung up before it was complete.
        TurnedAway: the router holds as many bytes as it may.
    """
    declared = _header(scope, b"content-length")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the body has {declared.decode()} bytes, and {limit} is the most this router takes")
    parts: list[bytes] = []
    try:
        return await _collect(receive, parts, limit, holding)
    except BaseException:
        parts.clear()  # the error's traceback keeps the frame, and so the bytes, until the garbage collector comes by
        raise


async def _collect(receive: Receive, parts: list[bytes], limit: int, holding: Holding | None) -> bytes:
    """Read a body into parts of some size: one that grows piece by piece is moved again and again, and leaves holes."""
    size, last = 0, bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body: bytes = message.get("body", b"")
        size += len(body)
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes, the most this router takes")
        if holding is not None:
            holding.grow(len(body))
        if not message.get("more_body", False):
            return b"".join((*parts, last, body)) if parts or last else body
        last += body
        if len(last) >= _PART:
            parts.append(bytes(last))
            last.clear()


async def until_hung_up(
    scope: Scope,
    receive: Receive,
    work: Coroutine[None, None, None],
    *,
    answered: Callable[[], bool] = lambda: False,
) -> None:
    """Do the work, or drop it as soon as the client has hung up. The body must have been read.

    A client that has its whole answer may go: work that is only tidying up then comes to its end.

    Raises:
        ClientDisconnect: the work was dropped.
    """
    leaving = scope.get(LEAVING)
    if leaving is None:
        await _watching(receive, work, answered)
    else:
        await _being_told(leaving, work, answered)


async def _being_told(
    leaving: Callable[[Callable[[], None] | None], None],
    work: Coroutine[None, None, None],
    answered: Callable[[], bool],
) -> None:
    """Do the work in this task; the server says when the client hangs up."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    def leave() -> None:
        nonlocal left
        if not answered():
            left = True
            task.cancel()

    leaving(leave)
    try:
        await work
    except asyncio.CancelledError:
        if not left or task.uncancel():
            raise
        raise ClientDisconnect from None
    finally:
        leaving(None)


async def _watching(receive: Receive, work: Coroutine[None, None, None], answered: Callable[[], bool]) -> None:
    """Do the work in a task of its own, while another one waits for the end of the connection."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if answered():
            await asyncio.wait((working,))
    finally:
        finished = working.done()
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))
    if not finished:
        raise ClientDisconnect
    working.result()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _header(scope: Scope, name: bytes) -> bytes:
    found: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if found is None:
        headers: Headers = tuple(scope["headers"])
        found = scope[_HEADERS] = dict(reversed(headers))  # of several with one name the first counts
    return found.get(name, b"")
