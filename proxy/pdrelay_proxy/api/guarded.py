"""The connections of clients: one whole head at a time, one request at a time, and an end to all of
it in time.

core/http/request_reader.py reads heads and bodies, and nothing else does: nothing behind it can
understand them differently. What waits, is charged, is refused or takes too long is decided here.
uvicorn's server makes these connections, and ends them; what it calls is ``__init__``, the methods
of an ``asyncio.Protocol`` and ``shutdown``.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any, Final, Protocol, cast

import uvicorn
from uvicorn.server import ServerState

from pdrelay_proxy.api.asgi_exchange import App, AsgiExchange, path_of
from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.flow_control import HIGH_WATER, FlowControl
from pdrelay_proxy.core.http.framing import Head, RefusalReason
from pdrelay_proxy.core.http.request_reader import RequestReader
from pdrelay_proxy.core.http.response_head import STATUS_LINES
from pdrelay_proxy.errors import (
    BadFraming,
    ClientError,
    HeadTooLarge,
    NotServed,
    ProxyError,
    TooManyConnections,
    TooSlow,
    UriTooLong,
)
from pdrelay_proxy.requests.error_body import error_body, error_headers

_FAULTS: Final[Mapping[type[ClientError], RefusalReason]] = {
    BadFraming: RefusalReason.MALFORMED,
    HeadTooLarge: RefusalReason.HEAD,
    UriTooLong: RefusalReason.URI,
    NotServed: RefusalReason.METHOD,
}
_LEAST_RATE: Final = 16 * 1024  # bytes of a body for which a client has another second
# bytes of a chunked body that are read at a time: they may be 2,700 chunks
_CHUNKED_MOST: Final = 16 * 1024
# requests of one client that are begun in a turn: each may be refused there and then
_AT_ONCE: Final = 8
# seconds in which a client that is refused may go on sending, so that it reads why
_LINGER_S: Final = 5.0
_LINGER_MOST_S: Final = 60.0  # the same for one that has not yet read what is before that
logger = logging.getLogger(__name__)


class Exchange(Protocol):
    """A request and its answer, as its connection sees them."""

    @property
    def keep_alive(self) -> bool:
        """Tell whether the connection stays open behind it."""
        ...

    @keep_alive.setter
    def keep_alive(self, value: bool, /) -> None: ...

    @property
    def response_started(self) -> bool:
        """Tell whether some of the answer was written."""
        ...

    @property
    def response_complete(self) -> bool:
        """Tell whether all of it was."""
        ...

    def leave(self) -> None:
        """Give it up: nobody reads the answer."""
        ...


class GuardedProtocol(asyncio.Protocol):
    """A connection, for clients that mean harm. Its requests go to the ASGI application."""

    clients: Clients
    # seconds in which a client must read some of what was written; None: no limit
    write_timeout_s: float | None = None
    on_write_timeout: Callable[[], None]  # called for each client that has not
    transport: asyncio.Transport
    flow: FlowControl
    exchange: Exchange | None = None  # that was begun last
    # nothing of a request has come, all before it have come to their ends, and one more may come
    between = True

    _asgi: AsgiExchange | None = None  # the same, if the application answers it
    _client: tuple[str, int] | None = None  # its address
    _network: str | None = None  # the name under which it is counted
    _over = False  # it is refused: what still comes is dropped
    _since = 0.0  # when the connection, the head or the body began, or the connection was over
    _reader: RequestReader
    _target = b""  # of the request that is refused, as far as it is known; of one whose body comes
    _left: bytearray | None = None  # what came behind a request that is not answered yet
    _held = 0  # bytes that are charged for what this connection has sent
    # the headers that the server puts into every head, and their lines
    _default: tuple[object, bytes] = None, b""
    _idle_since = 0.0  # on the loop's clock
    _idle_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: Mapping[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Begin as uvicorn's server begins each: ``config`` is loaded."""
        self.loop = _loop or asyncio.get_running_loop()
        self.server_state = server_state
        # it lists uvicorn's own classes
        self._connections = cast("set[GuardedProtocol]", server_state.connections)
        self._app = cast("App", config.loaded_app)  # pyright: ignore[reportUnknownMemberType] -- of any kind of ASGI
        self._keepalive_s = config.timeout_keep_alive
        self._app_state = app_state
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": config.asgi_version, "spec_version": "2.3"},
            "root_path": config.root_path,
        }

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it; one over a limit is refused at once."""
        self.transport = transport
        self._connections.add(self)
        # What each request looks at is found in an object in a fifth of the time that it takes to
        # find it in a class.
        self._over = False
        self._left = self.exchange = self._idle_timer = None
        self.flow = FlowControl(transport)
        self._reader = RequestReader()
        self._since = self.loop.time()
        self._limit_writes(transport)
        self._client = _address(transport, "peername")
        self._network, fault = self.clients.enter(self._client[0] if self._client else None)
        if fault is None:
            self.clients.watch(self)
            return
        error = self.clients.refusal(fault, self._network)
        if error is not None:
            self._refuse(fault, error)
            return
        self._stop()
        self.clients.on_refused(fault)
        transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what it held."""
        if isinstance(exc, TimeoutError):
            logger.warning(
                "a client (%s) has read nothing of its answer for %g s: its connection is closed",
                self._client[0] if self._client else "unknown",
                self.write_timeout_s or 0.0,
            )
            self.on_write_timeout()
        self._connections.discard(self)
        try:
            if self.exchange is not None:
                self.exchange.leave()
                self.exchange = self._asgi = None  # which hold us
            self.flow.resume_writing()
            if exc is None:
                self.transport.close()
            if self._idle_timer is not None:
                self._idle_timer.cancel()
        finally:
            self.clients.leave(self._network, self)
            self.free()

    def _limit_writes(self, transport: asyncio.Transport) -> None:
        """Have the kernel reset the connection of a client that takes nothing for too long (RFC
        5482; Linux, tcp(7)).

        An engine and a place at the gate wait with it. The time runs while bytes are unacknowledged
        or the client's window is closed.
        """
        if self.write_timeout_s is None:
            return
        sock = transport.get_extra_info("socket")
        # it has just been closed, or the system has no such option
        with suppress(OSError, AttributeError):
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self.write_timeout_s * 1000)
            )

    def _charge(self, size: int) -> None:
        """Take bytes of those that all requests together may hold, whether they are left or not:
        they are few.
        """
        self._held += size
        self.clients.charge(size)

    def free(self, size: int | None = None) -> None:
        """Give them back, so many or all."""
        size = self._held if size is None else size
        if size:
            self._held -= size
            self.clients.charge(-size)

    # What it sends

    def data_received(self, data: bytes) -> None:
        """Read what has come, as far as it is good."""
        if self._over:
            return
        if self._left is not None:
            self._keep(data)
            return
        try:
            self._read(data)
        except ClientError as error:
            self._refuse(_FAULTS[type(error)], error)
            return
        if not self.between:
            self.clients.watch(self)

    def _read(self, data: bytes) -> None:
        """Read one request after another, as long as each is answered before the next one is looked
        at.
        """
        reader = self._reader
        begun = 0
        while data and not self._over and not self.transport.is_closing():
            exchange = self.exchange
            if reader.in_body:
                data = self._read_body(data)
            elif begun == _AT_ONCE:
                self._keep(data)
                self.loop.call_soon(self._go_on)
                return
            elif (exchange is None or exchange.response_complete) and not self.flow.write_paused:
                # as in _is_next
                begun += 1
                try:
                    data = self._read_head(data)
                except ClientError:
                    self._target = reader.target(data)
                    raise
            else:
                self._keep(data)
                return

    @property
    def _is_next(self) -> bool:
        """Tell whether another request may begin: the one before is answered, and the client reads
        its answers.
        """
        return (
            self.exchange is None or self.exchange.response_complete
        ) and not self.flow.write_paused

    def _read_head(self, data: bytes) -> bytes:
        """Begin a request if its head is complete; return what is behind it, or behind all of the
        request.
        """
        reader = self._reader
        size = reader.head_size
        head = reader.read_head(data)
        if head is None:
            self._charge(len(data))
            if not size:
                self.between = False
                # the first one had to come since the connection was made
                if self.exchange is not None:
                    self._since = self.loop.time()
            return b""
        if size:
            self.free(size)
        rest = reader.rest
        self.between = head.length == 0
        self.begin(head)
        if head.length == len(rest):  # all of the request is here, and nothing else
            self.between = True
            self.serve(rest)
            return b""
        if head.length == 0:
            self._end()
            return rest
        reader.expect_body(head.length)
        self._since = self.loop.time()
        self._target = head.target
        return rest

    def _read_body(self, data: bytes) -> bytes:
        """Take some of a body; return what is behind it."""
        reader = self._reader
        is_chunked = reader.is_chunked
        if is_chunked and len(data) > _CHUNKED_MOST:
            self._keep(data[_CHUNKED_MOST:])
            self.loop.call_soon(self._go_on)
            data = data[:_CHUNKED_MOST]
        kept = reader.line_size
        piece = reader.read_body(data)
        if is_chunked:
            self._charge(reader.line_size - kept)
        if piece:
            self.take(
                piece, is_all=not (is_chunked or reader.in_body) and reader.received == len(piece)
            )
        if reader.in_body:
            return b""
        self._end()
        if self._left is None:
            return reader.rest
        self._left[:0] = reader.rest
        self._charge(len(reader.rest))
        return b""

    def _end(self) -> None:
        """A request has come to its end."""
        self.between = True
        # before all of it had come
        is_answered = self.exchange is not None and self.exchange.response_complete
        self.serve()
        if is_answered and not self.transport.is_closing():
            self.rest()

    # Where its requests go

    def begin(self, head: Head) -> None:
        """Begin a request: its head has come."""
        transport = self.transport
        scope = self._scope | {
            "client": self._client,
            "server": _address(transport, "sockname"),
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "state": dict(self._app_state),
        }
        self.exchange = self._asgi = AsgiExchange(self, head, scope)
        task = self.loop.create_task(self._asgi.run(self._app))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def take(self, piece: bytes, *, is_all: bool = False) -> None:
        """Take a piece of its body; ``is_all``: there is nothing else of it, before or behind."""
        del is_all
        if self._asgi is not None:
            self._asgi.take(piece)

    def serve(self, body: bytes = b"") -> None:
        """It is complete; ``body``: all of it, if none was taken before."""
        if self._asgi is not None:
            if body:
                self._asgi.take(body)
            self._asgi.end()

    def default_lines(self) -> bytes:
        """Return what is in every head; uvicorn's server makes it anew once a second."""
        headers = self.server_state.default_headers
        of, lines = self._default
        if of is not headers:
            lines = b"".join([b"%b: %b\r\n" % header for header in headers])
            self._default = headers, lines
        return lines

    def rest(self) -> None:
        """Nothing is under way: one timer for many requests sees whether that lasts too long."""
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self._keepalive_s, self._look_idle)

    def _look_idle(self) -> None:
        """Close a connection that has been idle for too long."""
        self._idle_timer = None
        if not self.between or not self.is_idle():
            return  # the end of what is under way sees to it
        left = self._idle_since + self._keepalive_s - self.loop.time()
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._look_idle)
        elif not self.transport.is_closing():
            self.transport.close()

    def is_idle(self) -> bool:
        """Tell whether no request is under way."""
        return self.exchange is None or self.exchange.response_complete

    def is_unread(self) -> bool:
        """Tell whether the client has yet to read some of what was written, as far as is known.

        Under TLS the encrypted bytes wait in a transport that nobody else can ask; there are some
        for as long as the kernel has bytes that are not acknowledged (Linux, tcp(7): SIOCOUTQ).
        """
        transport = self.transport
        if transport.get_write_buffer_size() or transport.get_extra_info("sslcontext") is None:
            return transport.get_write_buffer_size() > 0
        count = bytearray(4)
        with suppress(OSError):  # it has just been closed, or the system has no such call
            ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, count)
        return any(count)

    def shutdown(self) -> None:
        """End the connection behind the answer that is being written: the server ends."""
        if self.exchange is None or self.exchange.response_complete:
            self.transport.close()
        else:
            self.exchange.keep_alive = False

    # What comes behind a request that is not answered yet

    def _keep(self, data: bytes) -> None:
        """Keep it for later, and read no more if it is much."""
        self._charge(len(data))
        if self._left is None:
            self._left = bytearray(data)
        else:
            self._left += data
        if len(self._left) > HIGH_WATER:
            self.flow.fill()

    def answered(self, *, keep_alive: bool) -> None:
        """Go on with what is behind the request: all of its answer is written."""
        self._asgi = None
        self.server_state.total_requests += 1
        if not keep_alive and not self.between:
            # Some of its body is to come, and the client has yet to read the answer.
            self._stop()
            self._linger()
            return
        if not keep_alive:
            self.transport.close()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.rest()
        if self._left is not None:
            self.loop.call_soon(self._go_on)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        """Go on with it: the client has read its answers."""
        self.flow.resume_writing()
        if self._left is not None and self._is_next:
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        left = self._left
        self._left = None
        if left is None or self._over or self.transport.is_closing():
            return
        self.free(len(left))
        self.flow.empty()
        self.data_received(bytes(left))

    # Its end

    def due(self, *, elapsed: float) -> float | None:
        """Return when there was time enough for what it is about; see Timed."""
        bounds = self.clients.bounds
        if self._over:
            has_read = not self.transport.get_write_buffer_size()
            return self._since + (_LINGER_S if has_read else _LINGER_MOST_S)
        reader = self._reader
        if reader.in_body:
            if self.flow.read_paused or self.flow.is_full:
                self._since += elapsed  # it may not send
            return self._since + bounds.body_s + reader.received / _LEAST_RATE
        if reader.head_size or self.exchange is None:
            return self._since + bounds.head_s
        return None

    def on_overdue(self) -> None:
        """Give it up."""
        bounds = self.clients.bounds
        reader = self._reader
        if self._over:
            self.transport.abort()
        elif reader.in_body:
            passed_s = self.loop.time() - self._since
            said = (
                f"{reader.received} bytes of the body came in {passed_s:.0f} s, which is too slow"
            )
            self._refuse(
                RefusalReason.BODY_TIMEOUT,
                TooSlow(
                    f"{said}: a body has {bounds.body_s:g} s, and one more for each {_LEAST_RATE} "
                    f"bytes"
                ),
            )
        elif reader.has_begun_head:
            error = TooSlow(f"the head of the request was not complete within {bounds.head_s:g} s")
            self._target = reader.target()
            self._refuse(RefusalReason.HEAD_TIMEOUT, error)
        else:
            # it has asked for nothing, and so gets no answer that it could take for another one's
            self._stop()
            self.clients.on_refused(RefusalReason.HEAD_TIMEOUT)
            self.transport.close()

    def _stop(self) -> None:
        """Take nothing more that it sends, on whichever way."""
        self._over = True
        self.between = False

    def _refuse(self, fault: RefusalReason, error: ProxyError) -> None:
        """Answer what will not be served, if it has no answer yet, and read no more of it."""
        self._stop()
        self.clients.on_refused(fault)
        # a crowd is counted
        level = logging.DEBUG if isinstance(error, TooManyConnections) else logging.INFO
        logger.log(
            level,
            "a connection of %s is closed: %s",
            self._client[0] if self._client else "a client",
            error,
        )
        self._reader.drop_head()
        self._left = None
        self.free()
        exchange = self.exchange
        # Of this request: none is read behind another.
        is_open = exchange is not None and not exchange.response_complete
        if is_open and exchange is not None and exchange.response_started:
            self.transport.close()  # half of an answer has no other end
        elif is_open or not self._reader.in_body:
            self.transport.write(self._answer(error))
        if is_open and exchange is not None:
            exchange.leave()
        self._linger()

    def _answer(self, error: ProxyError) -> bytes:
        status, content_type, body = error_body(
            error, path_of(self._target), self.clients.bounds.overload
        )
        headers = [
            *self.server_state.default_headers,
            (b"content-type", content_type.encode("latin-1")),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        headers += [
            (name.encode(), value.encode("latin-1"))
            for name, value in error_headers(error, self.clients.bounds.overload).items()
        ]
        return b"".join(
            [STATUS_LINES[status], *[b"%b: %b\r\n" % header for header in headers], b"\r\n", body]
        )

    def _linger(self) -> None:
        """Close such that the client reads the answer: what it still sends would make the kernel
        take it back.
        """
        if self.transport.is_closing():
            return
        self._since = self.loop.time()
        self.clients.watch(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.is_full = False
            self.transport.resume_reading()
        else:  # TLS says goodbye, and reads on until that is answered
            self.transport.close()


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    """Return the host and port of one end; None for a socket that has none."""
    found: object = transport.get_extra_info(name)
    if not isinstance(found, (tuple, list)):
        return None
    parts = cast("Sequence[str | int]", found)
    return (str(parts[0]), int(parts[1])) if len(parts) >= 2 else None
