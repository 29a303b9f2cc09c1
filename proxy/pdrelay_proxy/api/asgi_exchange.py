"""A request that an ASGI application answers: FastAPI gets all requests that are not for endpoints
in this way.

The connection reads the head, and separates the body from the bytes behind it; this module has the
scope, the two channels (ASGI 3.0, https://asgi.readthedocs.io/en/latest/specs/www.html) and the
bytes of the answer (RFC 9112, 6 and 7).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import unquote

import httptools

from pdrelay_proxy.api.flow_control import HIGH_WATER, FlowControl
from pdrelay_proxy.core.http.framing import Head
from pdrelay_proxy.core.http.response_head import CONTROLS, HEADER_NAME, STATUS_LINES
from pdrelay_proxy.errors import BadFraming, ProxyError

Message: TypeAlias = MutableMapping[str, Any]
App: TypeAlias = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[Message]],
        Callable[[Message], Awaitable[None]],
    ],
    Awaitable[None],
]
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_BODY: Final = (204, 304)
# headers about the connection, which the router sets itself
_OURS: Final = (b"connection", b"transfer-encoding")
_FAILED: Final = b"Internal Server Error"
logger = logging.getLogger(__name__)


class ServingConnection(Protocol):
    """The connection of a request."""

    transport: asyncio.Transport
    flow: FlowControl

    def default_lines(self) -> bytes:
        """Return the header lines that the server adds to every head."""
        ...

    def answered(self, *, keep_alive: bool) -> None:
        """Note that the answer is written."""
        ...


class AsgiExchange:
    """One request and its answer."""

    def __init__(self, connection: ServingConnection, head: Head, scope: Mapping[str, Any]) -> None:
        """``scope``: the connection's part, to which this adds the request's.

        Raises:
            BadFraming: its target cannot be parsed.
        """
        self._connection = connection
        self._scope = dict(scope) | _request_scope(head)
        self._is_old = head.is_old
        # A client that waits for 100 Continue may never send its body: its connection ends with the
        # answer.
        self._expects = head.expects and head.length != 0 and not head.is_old
        self.keep_alive = head.keep_alive and not head.is_old and not self._expects
        self.response_started = self.response_complete = False
        self._body = bytearray()  # received, not yet passed to the application
        self._more = True  # more of the body is to come
        self._body_passed = False  # the application has the whole body
        self._gone = False  # the client does not read the answer
        self._news = asyncio.Event()
        self._has_body = True  # the answer has one
        self._chunks = False  # it is sent in chunks
        self._left: int | None = None  # bytes of it still to come, by its Content-Length

    # Called by the connection

    def receive_body(self, piece: bytes, /, *, is_all: bool = False) -> None:
        """Add a piece of the body."""
        del is_all
        if self.response_complete:
            return
        self._body += piece
        if len(self._body) > HIGH_WATER:
            self._connection.flow.pause_reading()
        self._news.set()

    def serve(self, body: bytes = b"", /) -> None:
        """Note that the request is complete; ``body``: the whole body, if no piece came before."""
        if body:
            self.receive_body(body)
        self._more = False
        self._news.set()

    def pause(self) -> None:
        """Leave it to the connection's FlowControl, for which ``_send`` waits."""

    def resume(self) -> None:
        """Leave that to it, too."""

    def leave(self, refusal: ProxyError | None = None) -> None:
        """Note that the client has gone, or was refused in the middle of its body."""
        del refusal  # the application says what becomes of it
        self._gone = True
        self._expects = False
        self._news.set()

    async def run(self, app: App) -> None:
        """Run the application.

        Whatever it does, the answer is ended, or the connection.
        """
        scope = self._scope
        try:
            await app(scope, self._receive, self._send)
        except asyncio.CancelledError:  # the server ends, and does not wait any longer
            self._fail()
            raise
        except Exception:
            logger.exception("the application has failed at %s %s", scope["method"], scope["path"])
            self._fail()
        else:
            if not (self.response_complete or self._gone):
                logger.error(
                    "the application has not answered %s %s", scope["method"], scope["path"]
                )
                self._fail()

    def _fail(self) -> None:
        """End an answer that the application left incomplete."""
        if self.response_complete or self._gone:
            return
        if self.response_started:
            self._connection.transport.close()
            return
        self.keep_alive = False
        self._begin(
            500,
            [
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"content-length", b"%d" % len(_FAILED)),
            ],
        )
        self._write(_FAILED, more=False)

    # ASGI

    async def _receive(self) -> Message:
        if self._expects and not self._connection.transport.is_closing():
            self._expects = False
            self._connection.transport.write(CONTINUE)
        while not (
            self._gone
            or self.response_complete
            or (not self._body_passed and (self._body or not self._more))
        ):
            self._connection.flow.resume_reading()
            self._news.clear()
            await self._news.wait()
        if self._gone or self.response_complete:
            return {"type": "http.disconnect"}
        body = bytes(self._body)
        self._body.clear()
        self._body_passed = not self._more
        return {"type": "http.request", "body": body, "more_body": self._more}

    async def _send(self, message: Message) -> None:
        await self._connection.flow.drain()
        if self._gone:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._expects = False
            self._begin(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._write(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} cannot be sent now")

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Write the head: the router itself sets the headers that decide where the answer ends."""
        lines = [STATUS_LINES[status], self._connection.default_lines()]
        for name, value in headers:
            if HEADER_NAME.fullmatch(name) is None or CONTROLS.search(value):
                raise RuntimeError(f"the header {name!r}: {value!r} cannot be sent")
            lower = name.lower()
            if lower == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in value.lower()
            if lower in _OURS:
                continue
            if lower == b"content-length":
                self._left = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        self._has_body = self._scope["method"] != "HEAD" and status not in _NO_BODY
        if self._has_body and self._left is None:
            self._chunks = not self._is_old
            # without chunks the end of the connection ends it
            self.keep_alive = self.keep_alive and self._chunks
        if self._chunks:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self.response_started = True
        self._connection.transport.write(b"".join([*lines, b"\r\n"]))

    def _write(self, body: bytes, *, more: bool) -> None:
        """Write a part of the body."""
        if self._has_body:
            if self._left is not None:
                self._left -= len(body)
                if self._left < 0 or (self._left and not more):
                    raise RuntimeError("the body is not as long as its content-length says")
            if self._chunks:
                body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (
                    b"" if more else b"0\r\n\r\n"
                )
            if body:
                self._connection.transport.write(body)
        if not more:
            self.response_complete = True
            self._scope = {}  # the connection keeps this object until its next request
            self._body.clear()
            self._news.set()
            self._connection.answered(keep_alive=self.keep_alive)


def _request_scope(head: Head) -> dict[str, Any]:
    """Return the request's part of the scope."""
    try:
        path, query = _parts_of(head.target)
    except httptools.HttpParserInvalidURLError as exc:
        raise BadFraming(
            "the target of the request cannot be read: write a path, or an absolute URL"
        ) from exc
    return {
        "http_version": "1.0" if head.is_old else "1.1",
        "method": head.method.decode("ascii"),
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "query_string": query,
        "headers": list(head.headers),
    }


def path_of(target: bytes) -> str:
    """Return the path in a target, without host, query and escapes; empty: there is none."""
    try:
        path, _ = _parts_of(target)
    except httptools.HttpParserInvalidURLError:
        return ""
    return unquote(path.decode("ascii"))


def _parts_of(target: bytes) -> tuple[bytes, bytes]:
    """Return the path and the query; a URL may end behind its host (RFC 9110, 4.2.3)."""
    url = httptools.parse_url(target)
    return url.path or b"/", url.query or b""
