"""The short way in for the requests that matter: POSTs that generate text, in plain HTTP/1.1.

uvicorn's own protocol reads and answers them as ASGI says, through FastAPI's middleware and routes. Here the same
parser hands a request straight to the application behind its path, in one task, and writes its answer without a detour.
Whatever is not plain (another path or method, HTTP/1.0, a query, Expect, an upgrade, a request pipelined behind
another) takes uvicorn's way through FastAPI, which serves these paths just as well.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, HttpToolsProtocol, RequestResponseCycle

POURING: Final = "xpyd.pouring"  # in a scope: an Outlet for the body of the answer, once its head has been sent
LEAVING: Final = "xpyd.leaving"  # in a scope: call it with what to do when the client hangs up, or with None
_STATUS: Final[Mapping[int, bytes]] = {status: b"HTTP/1.1 %d \r\n" % status for status in range(100, 600)}
_NAMES: Final[set[bytes]] = set()  # of headers that may be sent
_NAMES_MOST: Final = 64
_OK: Final = b"HTTP/1.1 200 OK\r\n"
_DISCONNECT: Final[Message] = {"type": "http.disconnect"}


class Tap(Protocol):
    """Where a body comes from that is poured."""

    def pause(self) -> None:
        """Pour no more for now: the client is slow."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...


class Outlet(Protocol):
    """Takes the body of a chunked answer without waiting; ``send`` does what is before and behind it."""

    def pour(self, piece: bytes, /) -> None:
        """Write a piece; one for a client that has gone is dropped."""
        ...

    def follow(self, tap: Tap | None, /) -> None:
        """Pause this tap while the client is slow; None: nothing is poured any more."""
        ...

    def gather(self) -> None:
        """Write what comes in this turn of the event loop in one go: all of the answer is said to be here."""
        ...


def hot_protocol(app: ASGIApp, paths: frozenset[str]) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``; ``app`` gets the plain requests for these paths."""
    return type("HotProtocol", (_HotProtocol,), {"hot_app": staticmethod(app), "hot_urls": _urls(paths)})


def _is_name(name: bytes) -> bool:
    """Look at the name of a header, once for those that the router itself has for all its answers."""
    if HEADER_RE.search(name):
        return False
    if len(_NAMES) < _NAMES_MOST:
        _NAMES.add(name)
    return True


def _urls(paths: frozenset[str]) -> Mapping[bytes, str]:
    return {path.encode("ascii"): path for path in paths}


class _Exchange(RequestResponseCycle):
    """One request and its answer."""

    def __init__(self, protocol: "_HotProtocol", *, keep_alive: bool) -> None:
        scope = cast("Any", protocol.scope)
        scope[LEAVING], scope[POURING] = self._on_leaving, self
        self.scope = scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.on_response = protocol.on_response_complete
        self.default_headers = protocol.server_state.default_headers
        self.disconnected = False
        self.keep_alive = keep_alive
        self.parts: list[bytes] = []
        self.size = 0  # bytes in them
        self.over = False  # all of the body is here
        self.read = False  # the application has it
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0
        self.begun = False  # its task runs
        self._head = b""  # it is written together with what follows
        self._gathered: list[bytes] | None = None  # what is written together at the end of this turn
        self._leaving: Callable[[], None] | None = None
        self._tap: Tap | None = None
        self._waiting: asyncio.Future[None] | None = None

    # For the protocol

    # uvicorn calls its set(), and nothing else; an attribute would be a reference cycle
    message_event = cast("Any", property(lambda self: self))

    async def run_asgi(self, app: Any) -> None:  # noqa: ANN401 (ASGI)
        """Serve the request; then the two of them hold each other no more, and need no garbage collector."""
        try:
            await super().run_asgi(app)
        finally:
            scope: Any = self.scope
            del scope[LEAVING], scope[POURING]

    def set(self) -> None:
        """Note that something has come, or that the client has gone."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self.disconnected and self._leaving is not None:
            leaving, self._leaving = self._leaving, None
            leaving()

    def full(self) -> None:
        """Note that the client is slow."""
        if self._tap is not None:
            self._tap.pause()

    def empty(self) -> None:
        """Note that it is not any more."""
        if self._tap is not None:
            self._tap.resume()

    # For the application

    def _on_leaving(self, act: Callable[[], None] | None) -> None:
        self._leaving = act
        if self.disconnected:
            self.set()

    def pour(self, piece: bytes) -> None:
        """Write a piece of a body that is sent in chunks."""
        if not self.disconnected:
            head, self._head = self._head, b""
            self._out(b"%b%x\r\n%b\r\n" % (head, len(piece), piece))

    def follow(self, tap: Tap | None) -> None:
        """Pause a tap while the client is slow."""
        self._tap = tap
        if tap is not None and self.flow.write_paused:
            tap.pause()

    def gather(self) -> None:
        """Write what comes in this turn of the event loop in one go."""
        self._gathered = []
        asyncio.get_running_loop().call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered and not self.disconnected:
            self.transport.write(b"".join(gathered))

    def _out(self, data: bytes) -> None:
        if self._gathered is None:
            self.transport.write(data)
        else:
            self._gathered.append(data)

    async def receive(self) -> Any:  # noqa: ANN401 (ASGI)
        """Return the next part of the body, or that the client has gone."""
        while not (self.parts or self.over or self.disconnected or self.response_complete):
            self.flow.resume_reading()
            await self._news()
        if self.disconnected or self.response_complete or self.read:
            while not (self.disconnected or self.response_complete):
                await self._news()
            return _DISCONNECT
        parts, self.parts, self.size = self.parts, [], 0
        self.read = self.over
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": not self.over}

    async def _news(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    async def send(self, message: Any) -> None:  # noqa: ANN401 (ASGI)
        """Write a part of the answer."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            if self.response_started:
                raise RuntimeError("the answer has begun already")
            self.response_started = True
            self._head = self._begin(message)
        elif not self.response_started or self.response_complete:
            raise RuntimeError("a part of an answer that has not begun, or has ended")
        else:
            self._write(message.get("body", b""), more=message.get("more_body", False))

    def _begin(self, message: Message) -> bytes:
        """Return the head; a header that cannot be sent is a bug, and raises."""
        status: int = message["status"]
        lines = [_OK if status == 200 else _STATUS[status]]
        for name, value in (*self.default_headers, *message.get("headers", ())):
            if HEADER_VALUE_RE.search(value) or not (name in _NAMES or _is_name(name)):
                raise RuntimeError(f"the header {name!r} cannot be sent")
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _write(self, body: bytes, *, more: bool) -> None:
        if self.chunked_encoding:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                framed += b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (not more and self.expected_content_length):
                raise RuntimeError("the answer is not as long as its head says")
            framed = body
        head, self._head = self._head, b""
        if head or framed:
            self._out(head + framed if head else framed)
        if not more:
            self._write_gathered()
            self.response_complete = True
            self.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class _HotProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but for the hot requests."""

    hot_app: ASGIApp
    hot_urls: Mapping[bytes, str]

    _exchange: _Exchange | None = None  # of the request that is being read
    _latest: _Exchange | None = None  # it may still be answered while requests behind it are read

    def on_headers_complete(self) -> None:
        """Decide which way the request goes."""
        path = self.hot_urls.get(self.url)
        parser, cycle = cast("Any", self.parser), cast("RequestResponseCycle | None", self.cycle)
        if (
            path is None
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or parser.should_upgrade()
            or self.expect_100_continue
            or not (cycle is None or cycle.response_complete)
        ):
            self._exchange = None
            super().on_headers_complete()
            return
        scope = cast("Scope", self.scope)
        scope["method"], scope["path"], scope["raw_path"], scope["query_string"] = "POST", path, self.url, b""
        self.cycle = self._exchange = self._latest = _Exchange(self, keep_alive=parser.should_keep_alive())

    def pause_writing(self) -> None:
        """Hold back what is sent, and what is poured."""
        super().pause_writing()
        if self._latest is not None:
            self._latest.full()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        if self._latest is not None:
            self._latest.empty()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; uvicorn tells the one that was read last."""
        super().connection_lost(exc)
        latest = self._latest
        if latest is not None and not latest.response_complete:
            latest.disconnected = True
            latest.set()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; a long one is read by the application, which has a limit."""
        exchange = self._exchange
        if exchange is None:
            super().on_body(body)
        elif not exchange.response_complete:
            exchange.parts.append(body)
            exchange.size += len(body)
            if exchange.size > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
                self._begin(exchange)
                exchange.set()

    def on_message_complete(self) -> None:
        """Have it served."""
        exchange = self._exchange
        if exchange is None:
            super().on_message_complete()
        elif not exchange.response_complete:
            exchange.over = True
            self._begin(exchange)
            exchange.set()

    def _begin(self, exchange: _Exchange) -> None:
        if not exchange.begun:
            exchange.begun = True
            self._start_asgi_task(exchange, cast("Any", self.hot_app))
