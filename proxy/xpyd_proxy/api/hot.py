"""The short way in for the requests that matter: POSTs that generate text, in plain HTTP/1.1.

uvicorn's own protocol reads and answers them as ASGI says, through FastAPI's middleware and routes. Here the same
parser hands a request straight to the application behind its path, in one task, and writes its answer without a detour.
Whatever is not plain (another path or method, HTTP/1.0, a query, Expect) takes uvicorn's way through FastAPI, which
serves these paths just as well.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, cast

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from xpyd_proxy.api.clients import Clients
from xpyd_proxy.api.guarded import GuardedProtocol
from xpyd_proxy.api.problems import error_body
from xpyd_proxy.api.usual import usual_request

POURING: Final = "xpyd.pouring"  # in a scope: an Outlet for the body of the answer, once its head has been sent
LEAVING: Final = "xpyd.leaving"  # in a scope: call it with what to do when the client hangs up, or with None
_STATUS: Final[Mapping[int, bytes]] = {status: b"HTTP/1.1 %d \r\n" % status for status in range(100, 600)}
_NAMES: Final[set[bytes]] = set()  # of headers that may be sent
_NAMES_MOST: Final = 64
_OK: Final = b"HTTP/1.1 200 OK\r\n"
_BUG: Final = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%b"
)
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


class Aboard(Protocol):
    """A request that goes the short way; to uvicorn it is the cycle of its connection."""

    keep_alive: bool
    disconnected: bool
    response_complete: bool

    def set(self) -> None:
        """Uvicorn says that the client has gone."""
        ...

    def full(self) -> None:
        """The client is slow."""
        ...

    def empty(self) -> None:
        """It is not any more."""
        ...


class Platform(Protocol):
    """The connection of a client, for a request on the short way."""

    @property
    def transport(self) -> asyncio.WriteTransport:
        """What to write to."""
        ...

    def default_lines(self) -> bytes:
        """Return what the server puts into every head."""
        ...

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete."""
        ...

    def leave_to_asgi(self, path: str, extras: Scope, *, keep_alive: bool) -> None:
        """Have the application go on with the request; ``extras`` go into its scope."""
        ...


class Shortcut(Protocol):
    """The short way."""

    def lets_in(self, headers: list[tuple[bytes, bytes]], /) -> bool:
        """Tell whether a request with these headers may be read to its end before it is looked at."""
        ...

    def take(
        self, platform: Platform, path: str, headers: list[tuple[bytes, bytes]], body: bytes, *, keep_alive: bool
    ) -> Aboard | None:
        """Take a request; None: it has to go the long way, and nothing has come of it here."""
        ...


def hot_protocol(
    app: ASGIApp,
    paths: frozenset[str],
    express: Shortcut | None = None,
    *,
    clients: Clients | None = None,
    most: int = 0,
    patience_s: float | None = None,
    on_stalled: Callable[[], None] = lambda: None,
) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``.

    Of the plain requests for these paths ``express`` gets those it takes whose bodies have at most ``most`` bytes, and
    ``app`` all others. ``patience_s``: seconds in which a client must read something; ``on_stalled`` is called for
    each that has not, and is given up.
    """
    given: dict[str, object] = {"hot_app": staticmethod(app), "hot_urls": _urls(paths), "express": express}
    given |= {
        "clients": clients or Clients(),
        "most": most,
        "patience_s": patience_s,
        "on_stalled": staticmethod(on_stalled),
    }
    return type("HotProtocol", (_HotProtocol,), given)


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

    def __init__(self, protocol: "_HotProtocol", scope: Scope, *, keep_alive: bool) -> None:
        scope[LEAVING], scope[POURING] = self._on_leaving, self
        self.scope = cast("Any", scope)
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


class _Intake:
    """A request while its body arrives; to uvicorn it is the cycle of its connection."""

    __slots__ = ("body", "disconnected", "held", "keep_alive", "path", "response_complete")

    def __init__(self, path: str, *, keep_alive: bool) -> None:
        self.path = path
        self.keep_alive = keep_alive
        self.body: bytes | bytearray = b""
        self.held = 0  # bytes of it that are charged
        self.disconnected = self.response_complete = False

    @property
    def message_event(self) -> "_Intake":
        """uvicorn sets it when the client has gone."""
        return self

    def set(self) -> None:
        """Nobody has heard of the request yet."""


class _HotProtocol(GuardedProtocol):
    """uvicorn's protocol, but for the hot requests."""

    # cycle: None, or what uvicorn calls so: _Exchange, _Intake, Aboard or its own
    hot_app: ASGIApp
    hot_urls: Mapping[bytes, str]
    express: Shortcut | None
    most: int

    _taken: list[tuple[bytes, bytes]]  # the headers of the request that was taken last
    _busy = False  # a request has begun to come, or is being answered
    _idle_since = 0.0  # on the loop's clock
    _idle_timer: asyncio.TimerHandle | None = None
    _intake: _Intake | None = None  # of the request that is being read
    _default: tuple[object, bytes] = None, b""  # the headers that the server puts into every head, and their lines

    _exchange: _Exchange | None = None  # of the request that is being read
    _latest: _Exchange | Aboard | None = None  # it may still be answered while requests behind it are read

    def data_received(self, data: bytes) -> None:
        """Take a request that is here all at once and is a usual one; the parser reads all others."""
        cycle = self.cycle
        is_first = self.between and not self.has_more and (cycle is None or cycle.response_complete)
        usual = usual_request(data, self.hot_urls) if is_first and self.express is not None else None
        if usual is None or len(usual[2]) > self.most:
            super().data_received(data)
            return
        self._unset_keepalive_if_required()
        self.on_message_begin()
        path, self.headers, body = usual
        intake = _Intake(path, keep_alive=True)
        intake.body = body
        self._exchange = None
        self.cycle = intake
        self.within = False
        self._take(intake)

    def on_message_begin(self) -> None:
        """Begin a request; what only the application needs is made when it needs it."""
        self._busy = self.within = True
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.scope: Any = None

    def _new_scope(self, headers: list[tuple[bytes, bytes]]) -> Scope:
        """Make what uvicorn makes for each request, for the one with these headers."""
        url, now_read, expects = self.url, self.headers, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)  # the request may be complete: it begins for the application alone
        scope = cast("Scope", self.scope)
        self.url, self.headers, self.expect_100_continue = url, now_read, expects
        scope["headers"] = headers
        return scope

    def on_headers_complete(self) -> None:
        """Decide which way the request goes."""
        self.headed = True
        path = self.hot_urls.get(self.url)
        parser = cast("Any", self.parser)
        if (
            path is None
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or self.expect_100_continue
        ):
            self._exchange = self._intake = None
            self._new_scope(self.headers)
            super().on_headers_complete()
            return
        keep_alive = parser.should_keep_alive()
        if self.express is None:
            self.cycle = self._exchange = self._to_asgi(path, self.headers, keep_alive=keep_alive)
        else:
            self._exchange = None
            self.cycle = self._intake = _Intake(path, keep_alive=keep_alive)

    def _to_asgi(
        self, path: str, headers: list[tuple[bytes, bytes]], *, keep_alive: bool, extras: Scope | None = None
    ) -> _Exchange:
        scope = self._new_scope(headers)
        scope.update(extras or {})
        scope["method"], scope["path"], scope["raw_path"], scope["query_string"] = "POST", path, path.encode(), b""
        exchange = self._latest = _Exchange(self, scope, keep_alive=keep_alive)
        return exchange

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
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        latest = self._latest
        if latest is not None and not latest.response_complete:
            latest.disconnected = True
            latest.set()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; a long one is read by the application, which has a limit."""
        exchange, intake = self._exchange, self._intake
        if intake is not None:
            before = len(intake.body)
            if isinstance(intake.body, bytearray):
                intake.body += body
            else:
                intake.body = bytearray(intake.body + body) if before else body
            size = before + len(body)
            is_long = before <= HIGH_WATER_LIMIT < size  # the first time
            if (
                size > self.most
                or (is_long and not cast("Shortcut", self.express).lets_in(self.headers))
                or not self.hold(len(body))
            ):
                self._read_on(intake)  # there it is charged anew, or refused
            else:
                intake.held += len(body)
        elif exchange is None:
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
        self.within = False
        exchange, intake = self._exchange, self._intake
        if intake is not None:
            self._take(intake)
        elif exchange is None:
            super().on_message_complete()
        elif not exchange.response_complete:
            exchange.over = True
            self.flow.resume_reading()  # or nobody would see the client go
            self._begin(exchange)
            exchange.set()

    def _take(self, intake: _Intake) -> None:
        """Have a request served the short way if it can go there."""
        self._intake, self._taken = None, self.headers
        if intake.held:
            self.free(intake.held)  # it is charged anew where it is admitted
            intake.held = 0
        body, intake.body = bytes(intake.body), b""
        express, aboard = self.express, None
        try:
            # who has not read earlier answers has to be waited for, which is for the long way
            if express is not None and not self.flow.write_paused:
                aboard = express.take(self, intake.path, self.headers, body, keep_alive=intake.keep_alive)
        except Exception as bug:  # the parser that calls this would take it for the client's fault
            self.logger.exception("a request could not be taken")
            _, said = error_body(bug)
            self.transport.write(_BUG % (len(said), said))
            self.transport.close()
            return
        if aboard is None:
            intake.body = body
            exchange = self._read_on(intake)
            exchange.over = True
            self.flow.resume_reading()  # or nobody would see the client go
            self._begin(exchange)
        elif self.cycle is intake:  # else it has left again
            self.cycle = self._latest = aboard

    def _read_on(self, intake: _Intake) -> _Exchange:
        """Leave a request to the application, as far as it has been read."""
        self._intake = None
        exchange = self._to_asgi(intake.path, self.headers, keep_alive=intake.keep_alive)
        self.cycle = self._exchange = exchange
        self.free(intake.held)
        intake.held = 0
        exchange.parts, exchange.size = [bytes(intake.body)] if intake.body else [], len(intake.body)
        if exchange.size > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
            self._begin(exchange)
        return exchange

    # For a request on the short way

    def default_lines(self) -> bytes:
        """Return what is in every head; uvicorn makes it anew once a second."""
        headers = self.server_state.default_headers
        of, lines = self._default
        if of is not headers:
            lines = b"".join([b"%b: %b\r\n" % header for header in headers])
            self._default = headers, lines
        return lines

    def answered(self, *, keep_alive: bool) -> None:
        """Go on with what is behind the request."""
        if self.has_more or self.flow.read_paused or not keep_alive or self.transport.is_closing():
            if not keep_alive:
                self.transport.close()
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        self._busy, self._idle_since = False, self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_idle)

    def on_response_complete(self) -> None:
        """Go on behind a request that went uvicorn's way."""
        self._busy = False
        super().on_response_complete()

    def _look_idle(self) -> None:
        """Close a connection that has been idle for too long: one timer for many requests."""
        self._idle_timer = None
        if (
            self._busy
            or not self.between
            or self.timeout_keep_alive_task is not None
            or not self.cycle.response_complete
        ):
            return  # the end of what is under way sees to it
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._look_idle)
        else:
            self.timeout_keep_alive_handler()

    def leave_to_asgi(self, path: str, extras: Scope, *, keep_alive: bool) -> None:
        """Have the application go on; a request behind this one may have been read already."""
        is_last = self.cycle is self._latest or isinstance(self.cycle, _Intake)
        exchange = self._to_asgi(path, self._taken, keep_alive=keep_alive, extras=extras)
        exchange.over = exchange.read = True
        if is_last:
            self.cycle = exchange
        self._begin(exchange)

    def _begin(self, exchange: _Exchange) -> None:
        if not exchange.begun:
            exchange.begun = True
            self._start_asgi_task(exchange, cast("Any", self.hot_app))
