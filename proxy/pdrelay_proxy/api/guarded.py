"""The connections of clients: one head at a time, one request at a time, and deadlines for all of
it.

core/http/request_reader.py alone reads heads and bodies, so nothing behind it can understand them
differently. This module decides which bytes wait, are charged or are refused, and what takes too
long. A request for an endpoint is answered by requests/request.py, any other by an ASGI application
(api/asgi_exchange.py); behind another server FastAPI serves both (api/endpoint_asgi.py).

uvicorn's server makes and ends these connections; it calls ``__init__``, the methods of an
``asyncio.Protocol`` and ``shutdown``.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import uvicorn
from uvicorn.server import ServerState

from pdrelay_proxy.api.asgi_exchange import CONTINUE, App, AsgiExchange, path_of
from pdrelay_proxy.api.clients import Clients, RefusalReason
from pdrelay_proxy.api.exchange import Exchange
from pdrelay_proxy.api.flow_control import HIGH_WATER, FlowControl
from pdrelay_proxy.api.idle_timer import IdleTimer
from pdrelay_proxy.api.unread_answers import UnreadAnswers
from pdrelay_proxy.core.http.framing import Head
from pdrelay_proxy.core.http.request_reader import RequestReader
from pdrelay_proxy.core.http.response_head import STATUS_LINES
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
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
from pdrelay_proxy.io.delivery import bytes_taken, has_unread, reset_at_close
from pdrelay_proxy.requests.error_body import error_answer
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.request_set import RequestSet
from pdrelay_proxy.requests.response import LONG_BODY, HttpResponse

_FAULTS: Final[Mapping[type[ClientError], RefusalReason]] = {
    BadFraming: RefusalReason.MALFORMED,
    HeadTooLarge: RefusalReason.HEAD,
    UriTooLong: RefusalReason.URI,
    NotServed: RefusalReason.METHOD,
}
_ENDPOINTS: Final[Mapping[bytes, str]] = {path.encode("ascii"): path for path in ENDPOINTS}
_LEAST_RATE: Final = 16 * 1024  # bytes of a body that give a client another second
# bytes of a chunked body read at a time: they may be 2,700 chunks
_CHUNKED_MOST: Final = 16 * 1024
# requests of one connection begun in one iteration: each may be refused at once
_AT_ONCE: Final = 8
# seconds in which a refused client may go on sending, so that it reads the reason
_LINGER_S: Final = 5.0
_LINGER_MOST_S: Final = 60.0  # the same for a client that has not yet read the answers before
logger = logging.getLogger(__name__)


def connection_class(
    clients: Clients, unread_answers: UnreadAnswers, requests: RequestSet | None = None
) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``; ``requests`` serves endpoints,
    if this port has them.
    """
    attributes = {"clients": clients, "unread_answers": unread_answers, "requests": requests}
    return type("GuardedProtocol", (GuardedProtocol,), attributes)


class GuardedProtocol(asyncio.Protocol):
    """A connection of a client that may be hostile."""

    clients: Clients
    unread_answers: UnreadAnswers
    requests: RequestSet | None = None  # None: the application answers all
    transport: asyncio.Transport
    flow: FlowControl
    exchange: Exchange | None = None  # the latest
    # the connection is between two requests: no byte of the next one has come, and it may come
    between = True

    _client: tuple[str, int] | None = None  # its address
    _network: str | None = None  # the network under which it is counted
    _over = False  # it is refused: further bytes are dropped
    _since = 0.0  # when the connection, the head or the body began, or the connection was over
    _reader: RequestReader
    _target = b""  # target of a refused request, if known, or of one whose body is coming
    _pending: bytearray | None = None  # bytes behind a request that is not answered yet
    # the rest of a long answer, until the client has read enough
    _unwritten: memoryview | None = None
    _held = 0  # bytes charged for this connection
    # the headers that the server adds to every head, and their lines
    _default: tuple[object, bytes] = None, b""
    _idle_timer: IdleTimer

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: Mapping[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Start as uvicorn's server starts each connection: ``config`` is loaded."""
        self.loop = _loop or asyncio.get_running_loop()
        self.server_state = server_state
        # the set's type names uvicorn's own classes
        self._connections = cast("set[GuardedProtocol]", server_state.connections)
        self._app = cast("App", config.loaded_app)  # pyright: ignore[reportUnknownMemberType] -- of any kind of ASGI
        self._idle_timer = IdleTimer(self.loop, config.timeout_keep_alive)
        self._app_state = app_state
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": config.asgi_version, "spec_version": "2.3"},
            "root_path": config.root_path,
        }

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; one over a limit is refused at once."""
        self.transport = transport
        self._connections.add(self)
        # Attributes that each request reads: a lookup in the object takes a fifth of one in the
        # class.
        self._over = False
        self._pending = self.exchange = self._unwritten = None
        self.flow = FlowControl(transport)
        self._reader = RequestReader()
        self._since = self.loop.time()
        self.unread_answers.enter(self)
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
        """Release everything that the connection held."""
        self._connections.discard(self)
        self._unwritten = None
        try:
            if self.exchange is not None:
                self.exchange.leave()
                self.exchange = None  # it refers to this object
            self.flow.resume_writing()
            if exc is None:
                self.transport.close()
            self._idle_timer.cancel()
        finally:
            self.unread_answers.leave(self)
            self.clients.leave(self._network, self)
            self.free()

    def _charge(self, size: int) -> None:
        """Charge bytes to the limit of all requests, whether or not it has room: they are few."""
        self._held += size
        self.clients.charge(size)

    def free(self, size: int | None = None) -> None:
        """Give back charged bytes, some or all."""
        size = self._held if size is None else size
        if size:
            self._held -= size
            self.clients.charge(-size)

    # Its bytes

    def data_received(self, data: bytes) -> None:
        """Read the received bytes, as far as they are valid."""
        if self._over:
            return
        if self._pending is not None:
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
        """Read one request after another, as long as each is answered before the next is read."""
        reader = self._reader
        begun = 0
        while data and not self._over and not self.transport.is_closing():
            exchange = self.exchange
            if reader.in_body:
                data = self._read_body(data)
            elif begun == _AT_ONCE:
                self._keep(data)
                self.loop.call_soon(self._read_pending)
                return
            elif (exchange is None or exchange.response_complete) and not self.flow.write_paused:
                # as in _is_next: an answer that is not all written has paused writing
                begun += 1
                try:
                    data = self._read_head(data)
                except ClientError:
                    self._target = reader.target(data)
                    raise
            else:
                self._keep(data)
                return

    def _read_head(self, data: bytes) -> bytes:
        """Begin a request if its head is complete; return the bytes behind the head, or behind the
        whole request.
        """
        reader = self._reader
        size = reader.head_size
        head = reader.read_head(data)
        if head is None:
            self._charge(len(data))
            if not size:
                self.between = False
                # the first head is timed from the connection's beginning
                if self.exchange is not None:
                    self._since = self.loop.time()
            return b""
        if size:
            self.free(size)
        rest = reader.rest
        self.between = head.length == 0
        self._begin(head)
        if head.length == len(rest):  # exactly the whole request is here
            self.between = True
            self._serve(rest)
            return b""
        if head.length == 0:
            self._end()
            return rest
        reader.expect_body(head.length)
        self._since = self.loop.time()
        self._target = head.target
        return rest

    def _read_body(self, data: bytes) -> bytes:
        """Read a piece of a body; return the bytes behind the body."""
        reader = self._reader
        is_chunked = reader.is_chunked
        if is_chunked and len(data) > _CHUNKED_MOST:
            self._keep(data[_CHUNKED_MOST:])
            self.loop.call_soon(self._read_pending)
            data = data[:_CHUNKED_MOST]
        line_size = reader.line_size
        piece = reader.read_body(data)
        if is_chunked:
            self._charge(reader.line_size - line_size)
        if piece and self.exchange is not None:
            is_all = not (is_chunked or reader.in_body) and reader.received == len(piece)
            self.exchange.receive_body(piece, is_all=is_all)
        if reader.in_body:
            return b""
        self._end()
        if self._pending is None:
            return reader.rest
        self._pending[:0] = reader.rest
        self._charge(len(reader.rest))
        return b""

    def _end(self) -> None:
        """Serve a request that is complete."""
        self.between = True
        is_answered = self._is_idle  # before its whole body had come
        self._serve()
        if is_answered and not self.transport.is_closing():
            self._idle_timer.restart(self._close_if_idle)

    def _keep(self, data: bytes) -> None:
        """Keep bytes for later, and stop reading if they are many."""
        self._charge(len(data))
        if self._pending is None:
            self._pending = bytearray(data)
        else:
            self._pending += data
        if len(self._pending) > HIGH_WATER:
            self.flow.fill()

    def _read_pending(self) -> None:
        pending = self._pending
        self._pending = None
        if pending is None or self._over or self.transport.is_closing():
            return
        self.free(len(pending))
        self.flow.empty()
        self.data_received(bytes(pending))

    # Its requests

    def _begin(self, head: Head) -> None:
        """Begin a request: its head has come."""
        requests = self.requests
        if requests is not None and head.method == b"POST":
            path = _ENDPOINTS.get(head.target) or _endpoint_in(head.target)
            if path is not None:
                self._begin_request(requests, path, head)
                return
        transport = self.transport
        scope = self._scope | {
            "client": self._client,
            "server": _address(transport, "sockname"),
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "state": dict(self._app_state),
        }
        exchange = self.exchange = AsgiExchange(self, head, scope)
        task = self.loop.create_task(exchange.run(self._app))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def _begin_request(self, requests: RequestSet, path: str, head: Head) -> None:
        """Begin a request for an endpoint."""
        keep_alive = head.keep_alive and not head.is_old
        # the client sends its body after 100 Continue
        waits = head.expects and not head.is_old and head.length != 0
        response = HttpResponse(
            self, self.transport.write, keep_alive and not waits, not head.is_old
        )
        request = self.exchange = Request(requests, response, path, head.headers, head.shown)
        if request.check() and waits:
            # a refusal closes the connection: the next bytes may be the body or a request
            request.keep_alive = keep_alive
            self.transport.write(CONTINUE)

    def _serve(self, body: bytes = b"") -> None:
        """Serve the complete request; ``body``: the whole body, if no piece came before."""
        exchange = self.exchange
        if exchange is not None:
            if self.flow.write_paused:
                exchange.pause()  # the client has not read earlier answers
            exchange.serve(body)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is under way, and no answer is being written."""
        return self._unwritten is None and (
            self.exchange is None or self.exchange.response_complete
        )

    @property
    def _is_next(self) -> bool:
        """Whether another request may begin: all is answered, and the client reads its answers."""
        return self._is_idle and not self.flow.write_paused

    def default_lines(self) -> bytes:
        """Return the lines in every head; uvicorn's server renews them once a second."""
        headers = self.server_state.default_headers
        known_headers, lines = self._default
        if known_headers is not headers:
            lines = b"".join([b"%b: %b\r\n" % header for header in headers])
            self._default = headers, lines
        return lines

    # Its answers

    def pause_writing(self) -> None:
        """Pause the answer: the client reads more slowly than is written."""
        self.flow.pause_writing()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        """Resume: the client has read its answers."""
        self.flow.resume_writing()
        if self._pending is not None and self._is_next:
            self.loop.call_soon(self._read_pending)
        self._write_more()
        if self.exchange is not None:
            self.exchange.resume()

    def write_long(self, head: bytes, body: bytes) -> None:
        """Write an answer in pieces: a transport would buffer all of it, uncounted, for a client
        that does not read.
        """
        self.transport.write(head)
        self._unwritten = memoryview(body)
        self._charge(len(body))
        self._write_more()

    def _write_more(self) -> None:
        """Write as much of a long answer as the transport takes."""
        rest = self._unwritten
        while rest and not (self.flow.write_paused or self.transport.is_closing()):
            piece = rest[:LONG_BODY]
            rest = rest[LONG_BODY:]
            self._unwritten = rest
            self.transport.write(bytes(piece))
            self.free(len(piece))
        if rest is not None and not rest:
            self._unwritten = None
            exchange = self.exchange
            if exchange is not None and exchange.response_complete:
                self.answered(keep_alive=exchange.keep_alive)

    def eof_received(self) -> None:
        """Give the rest of a long answer to the transport, which writes it before it closes."""
        rest = self._unwritten
        self._unwritten = None
        if rest is not None:
            self.transport.write(rest)  # its bytes stay charged until the connection is lost

    def answered(self, *, keep_alive: bool) -> None:
        """Continue with the bytes behind the request, once its whole answer is written."""
        if self._unwritten is not None:
            return  # its end comes here again
        self.server_state.total_requests += 1
        if not keep_alive and not self.between:
            # Some of its body is still to come, and the client has to read the answer.
            self._stop()
            self._linger()
            return
        if not keep_alive:
            self.transport.close()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._idle_timer.restart(self._close_if_idle)
        if self._pending is not None:
            self.loop.call_soon(self._read_pending)

    # What the client reads

    def is_unread(self) -> bool:
        """Return whether the client seems to have unread bytes of an answer."""
        return has_unread(self.transport)

    def bytes_taken(self) -> int | None:
        """Return how many bytes the client has taken; None: none is left for it."""
        return bytes_taken(self.transport)

    def on_unread(self, seconds: float) -> None:
        """Reset the connection: the client has taken no byte for so many seconds."""
        logger.warning(
            "a client (%s) has read nothing of its answer for %g s: its connection is closed",
            self._client[0] if self._client else "unknown",
            seconds,
        )
        reset_at_close(self.transport.get_extra_info("socket"))
        self.transport.abort()

    # Its end

    def shutdown(self) -> None:
        """End the connection behind the present answer: the server ends."""
        exchange = self.exchange
        if exchange is None or self._is_idle:
            self.transport.close()
        else:
            exchange.keep_alive = False

    def _close_if_idle(self) -> None:
        """Close a connection that has been idle for too long."""
        # the end of a request that is under way starts the timer again
        if self.between and self._is_idle and not self.transport.is_closing():
            self.transport.close()

    def due(self, *, elapsed: float) -> float | None:
        """Return the deadline of the present head, body or closing; see Timed."""
        bounds = self.clients.bounds
        if self._over:
            has_read = not self.transport.get_write_buffer_size()
            return self._since + (_LINGER_S if has_read else _LINGER_MOST_S)
        reader = self._reader
        if reader.in_body:
            if self.flow.read_paused or self.flow.is_full:
                self._since += elapsed  # the client is not allowed to send
            return self._since + bounds.body_s + reader.received / _LEAST_RATE
        if reader.head_size or self.exchange is None:
            return self._since + bounds.head_s
        return None

    def on_overdue(self) -> None:
        """Refuse or close a connection past its deadline."""
        bounds = self.clients.bounds
        reader = self._reader
        if self._over:
            self.transport.abort()
        elif reader.in_body:
            passed_s = self.loop.time() - self._since
            text = (
                f"{reader.received} bytes of the body came in {passed_s:.0f} s, which is too slow"
            )
            self._refuse(
                RefusalReason.BODY_TIMEOUT,
                TooSlow(
                    f"{text}: a body has {bounds.body_s:g} s, and one more for each {_LEAST_RATE} "
                    f"bytes"
                ),
            )
        elif reader.has_begun_head:
            error = TooSlow(f"the head of the request was not complete within {bounds.head_s:g} s")
            self._target = reader.target()
            self._refuse(RefusalReason.HEAD_TIMEOUT, error)
        else:
            # it has sent no request: an answer could be taken for the next one's
            self._stop()
            self.clients.on_refused(RefusalReason.HEAD_TIMEOUT)
            self.transport.close()

    def _stop(self) -> None:
        """Read nothing more from the connection."""
        self._over = True
        self.between = False

    def _refuse(self, fault: RefusalReason, error: ProxyError) -> None:
        """Answer a request that will not be served, if it has no answer, and read no more of it."""
        self._stop()
        self.clients.on_refused(fault)
        if self._unwritten is not None:  # half an answer leaves no place for an error
            self.transport.abort()
            return
        # refusals of a crowd are only counted
        level = logging.DEBUG if isinstance(error, TooManyConnections) else logging.INFO
        logger.log(
            level,
            "a connection of %s is closed: %s",
            self._client[0] if self._client else "a client",
            error,
        )
        self._reader.drop_head()
        self._pending = None
        self.free()
        exchange = self.exchange
        # It is the exchange of this request: none is read behind an unanswered one.
        if exchange is None or exchange.response_complete:
            if not self._reader.in_body:
                self.transport.write(self._answer(error))
        elif exchange.response_started:
            self.transport.close()  # half an answer cannot be ended otherwise
            exchange.leave()
        else:
            self.transport.write(self._answer(error))
            exchange.leave(error)
        self._linger()

    def _answer(self, error: ProxyError) -> bytes:
        answer = error_answer(error, path_of(self._target), self.clients.bounds.overload)
        about_body = (answer.content_type.encode("latin-1"), len(answer.body))
        return b"".join(
            [
                STATUS_LINES[answer.status],
                self.default_lines(),
                b"content-type: %b\r\ncontent-length: %d\r\n" % about_body,
                b"connection: close\r\n",
                answer.header_lines(),
                b"\r\n",
                answer.body,
            ]
        )

    def _linger(self) -> None:
        """Close so that the client can read the answer: unread bytes would make the kernel reset
        the connection (RFC 9112, 9.6).
        """
        if self.transport.is_closing():
            return
        self._since = self.loop.time()
        self.clients.watch(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.is_full = False
            self.transport.resume_reading()
        else:  # TLS sends close_notify, and reads until the client's (RFC 8446, 6.1)
            self.transport.close()


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    """Return the host and port of one end; None: the socket has none."""
    address: object = transport.get_extra_info(name)
    if not isinstance(address, (tuple, list)):
        return None
    parts = cast("Sequence[str | int]", address)
    return (str(parts[0]), int(parts[1])) if len(parts) >= 2 else None


def _endpoint_in(target: bytes) -> str | None:
    """Return the path of an endpoint in another spelling: with a query, a host or escapes."""
    path = path_of(target)
    return path if path in ENDPOINTS else None
