"""What stands before the parser: one whole head at a time, one request at a time, and an end to all of it in time.

httptools has no limits, adds up the pieces of a head in quadratic time, takes trailers for headers and ends a request
with ``Upgrade`` behind its head. So it only gets heads that core/http/framing.py has read, and their bodies.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.core.http.framing import HEAD_MOST, ChunkedBody, Head, RefusalReason, find_end, target_in
from pdrelay_proxy.core.http.repeated_head import RepeatedHead
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
_BLANK_MOST: Final = 16  # bytes of empty lines before a request (RFC 9112, 2.2: one line is to be ignored)
_CHUNKED_MOST: Final = 16 * 1024  # bytes of a chunked body that are read at a time: they may be 2,700 chunks
_HEAD_END: Final = b"\r\n\r\n"
_RETURN: Final = 13  # begins an empty line before a request
_LINGER_S: Final = 5.0  # seconds in which a client that is refused may go on sending, so that it reads why
_LINGER_MOST_S: Final = 60.0  # the same for one that has not yet read what is before that
logger = logging.getLogger(__name__)


class ReadControl(FlowControl):
    """uvicorn's, with a second reason not to read.

    An application that takes a body resumes reading with each part of it. What the parser has not read yet would then
    grow faster than it is read.
    """

    is_full = False  # enough waits for the parser

    def resume_reading(self) -> None:
        """Note that the application takes more."""
        if self.read_paused:
            self.read_paused = False
            self._go_on()

    def fill(self) -> None:
        """Read no more before ``empty``."""
        self.is_full = True
        self._transport.pause_reading()

    def empty(self) -> None:
        """Note that little waits for the parser."""
        if self.is_full:
            self.is_full = False
            self._go_on()

    def _go_on(self) -> None:
        if not (self.read_paused or self.is_full):
            self._transport.resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, for clients that mean harm."""

    clients: Clients
    write_timeout_s: float | None = None  # seconds in which a client must read some of what was written; None: no limit
    on_write_timeout: Callable[[], None]  # called for each client that has not
    cycle: Any  # None, or the request that was read last: response_complete, disconnected, message_event
    headed = False  # the parser has the head of a request
    within = False  # the parser has some of a request, and not all of it
    between = True  # nothing of a request has come, all before it have come to their ends, and one more may come

    _reading: ReadControl  # uvicorn's flow
    _network: str | None = None  # the name under which it is counted
    _over = False  # it is refused: what still comes is dropped
    _since = 0.0  # when the connection, the head or the body began, or the connection was over
    _heads: RepeatedHead
    _head: bytearray | None = None  # the beginning of a head
    _target = b""  # of the request that is refused, as far as it is known; of one whose body comes
    _in_body = False
    _is_ours = False  # the request that is being read is served without the parser
    _remaining = 0  # bytes of a body whose length was declared
    _chunks: ChunkedBody | None = None
    _received = 0  # bytes of the body
    _left: bytearray | None = None  # what came behind a request that is not answered yet
    _held = 0  # bytes that are charged for what this connection has sent

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it; one over a limit is refused at once."""
        super().connection_made(transport)
        # What each request looks at is found in an object in a fifth of the time that it takes to find it in a class.
        self._over, self._in_body, self._head, self._left = False, False, None, None
        self.flow = self._reading = ReadControl(transport)
        self._heads = RepeatedHead()
        self._since = self.loop.time()
        self._limit_writes(transport)
        self._network, fault = self.clients.enter(self.client[0] if self.client else None)
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
                self.client[0] if self.client else "unknown",
                self.write_timeout_s or 0.0,
            )
            self.on_write_timeout()
        try:
            super().connection_lost(exc)
        finally:
            self.clients.leave(self._network, self)
            self.free()

    def _limit_writes(self, transport: asyncio.Transport) -> None:
        """Have the kernel reset the connection of a client that takes nothing for too long (RFC 5482; Linux, tcp(7)).

        uvicorn waits for ever, and an engine and a place at the gate wait with it. The time runs while bytes are
        unacknowledged or the client's window is closed.
        """
        if self.write_timeout_s is None:
            return
        sock = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # it has just been closed, or the system has no such option
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self.write_timeout_s * 1000))

    def hold(self, size: int) -> bool:
        """Take bytes of those that all requests together may hold; False: there are not as many left."""
        if not self.clients.hold(size):
            return False
        self._held += size
        return True

    def free(self, size: int | None = None) -> None:
        """Give them back, so many or all."""
        size = self._held if size is None else size
        if size:
            self._held -= size
            self.clients.charge(-size)

    def _charge(self, size: int) -> None:
        """Take bytes that are few, whether they are left or not."""
        self._held += size
        self.clients.charge(size)

    # What it sends

    def data_received(self, data: bytes) -> None:
        """Have the parser read what has come, as far as it is good."""
        if self._over:
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
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
        while data and not self._over and not self.transport.is_closing():
            if self._in_body:
                data = self._read_length(data) if self._chunks is None else self._read_chunks(self._chunks, data)
            elif (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused:  # as in _is_next
                try:
                    data = self._read_head(data)
                except ClientError:
                    self._target = target_in(self._head or data)
                    raise
            else:
                self._keep(data)
                return

    @property
    def _is_next(self) -> bool:
        """Tell whether another request may begin: the one before is answered, and the client reads its answers."""
        return (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused

    def _read_head(self, data: bytes) -> bytes:
        """Read a head if it is complete; return what is behind it."""
        if self._head is None and data[0] != _RETURN:  # nearly always all of it comes at once
            end = data.find(_HEAD_END, 0, HEAD_MOST) + len(_HEAD_END)
            if end >= len(_HEAD_END):
                return self._begin(self._heads.read(data[:end]), data[end:])
        received: bytes | bytearray = data
        read, start = 0, 0
        if self._head is not None:
            read = len(self._head)
            self._head += data
            received = self._head
        while received.startswith(b"\r\n", start):
            start += 2
        if start > _BLANK_MOST:
            raise BadFraming(f"there are more than {_BLANK_MOST} bytes of empty lines before the request line")
        end = find_end(received, start, read=max(0, read - start))
        if end < 0:
            self._charge(len(data))
            if self._head is None:
                self._head, self.between = bytearray(data), False
                if self.cycle is not None:  # the first one had to come since the connection was made
                    self._since = self.loop.time()
            return b""
        head = self._heads.read(bytes(received[start:end]))
        if read:
            self._head = None
            self.free(read)
        return self._begin(head, bytes(received[end:]))

    def _begin(self, head: Head, rest: bytes) -> bytes:
        """Begin a request; return what is behind its head, unless all of the request is here and nothing else."""
        self._is_ours = self.takes(head)
        if self._is_ours and head.length == len(rest):
            self.between = True
            self.serve(rest)
            return b""
        if not self._is_ours:
            self.headed = False
            self._parse(head.raw)
            self._expect(headed=True, within=head.length != 0)
            if head.expects and head.length != 0:
                self.cycle.keep_alive = False  # its body may never come, if the answer does not wait for it
        if head.length == 0:
            self._end()
        else:
            self.between, self._in_body = False, True
            self._remaining, self._chunks = (0, ChunkedBody()) if head.length is None else (head.length, None)
            self._since, self._received = self.loop.time(), 0
            self._target = head.target
        return rest

    def _read_length(self, data: bytes) -> bytes:
        """Read some of a body of known length; return what is behind it."""
        piece = data[: self._remaining]
        self._remaining -= len(piece)
        self._received += len(piece)
        if self._is_ours:
            self.take(piece, is_all=self._received == len(piece) and not self._remaining)
        else:
            self._parse(piece)
            self._expect(headed=True, within=self._remaining > 0)
        if not self._remaining:
            self._end()
        return data[len(piece) :]

    def _read_chunks(self, chunks: ChunkedBody, data: bytes) -> bytes:
        """Read some of a chunked body; return what is behind it."""
        if len(data) > _CHUNKED_MOST:
            self._keep(data[_CHUNKED_MOST:])
            self.loop.call_soon(self._go_on)
            data = data[:_CHUNKED_MOST]
        body = chunks.feed(data)
        if body:
            self._received += len(body)
            if self._is_ours:
                self.take(body)
            else:
                self._parse(b"%x\r\n%b\r\n" % (len(body), body))
        if not chunks.is_over:
            return b""
        if not self._is_ours:
            self._parse(b"0\r\n\r\n")
            self._expect(headed=True, within=False)
        self._end()
        if self._left is None:
            return chunks.rest
        self._left[:0] = chunks.rest
        self._charge(len(chunks.rest))
        return b""

    # A request that need not be parsed once more

    def takes(self, head: Head) -> bool:
        """Begin a request that is served without httptools; False: it is another one's."""
        del head
        return False

    def take(self, piece: bytes, *, is_all: bool = False) -> None:
        """Take a piece of its body; ``is_all``: there is nothing else of it, before or behind."""

    def serve(self, body: bytes = b"") -> None:
        """It is complete; ``body``: all of it, if none was taken before."""

    def _parse(self, data: bytes) -> None:
        parser = cast("Any", self.parser)  # there is one as long as the connection is open
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            raise BadFraming("the target of the request cannot be read: write a path, or an absolute URL") from exc
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            raise BadFraming(f"the request is not valid HTTP/1.1: {exc}") from exc

    def _expect(self, *, headed: bool, within: bool) -> None:
        """See that the parser has come as far as we have: what two readers understand differently is refused."""
        if self.headed != headed or (self.within != within and not self.transport.is_closing()):
            logger.error("the parser and core/http/framing.py disagree about where a request ends: it is refused")
            raise BadFraming("it is not clear where the request ends")

    def _end(self) -> None:
        """A request has come to its end."""
        self.between, self._in_body, self._chunks = True, False, None
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_complete  # before all of it had come
        if self._is_ours:
            self.serve()
        if is_answered and not self.transport.is_closing() and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # What comes behind a request that is not answered yet

    def _keep(self, data: bytes) -> None:
        """Keep it for later, and read no more if it is much."""
        self._charge(len(data))
        if self._left is None:
            self._left = bytearray(data)
        else:
            self._left += data
        if len(self._left) > HIGH_WATER_LIMIT:
            self._reading.fill()

    def on_response_complete(self) -> None:
        """Go on with what is behind the request."""
        super().on_response_complete()
        if self._left is not None:
            self.loop.call_soon(self._go_on)

    def resume_writing(self) -> None:
        """Go on with it: the client has read its answers."""
        super().resume_writing()
        if self._left is not None and self._is_next:
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        left, self._left = self._left, None
        if left is None or self._over or self.transport.is_closing():
            return
        self.free(len(left))
        self._reading.empty()
        self.data_received(bytes(left))

    # The parser

    def on_message_begin(self) -> None:
        """A request begins."""
        self.within = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self.headed = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """It is complete."""
        self.within = False
        super().on_message_complete()

    # Its end

    def due(self, *, elapsed: float) -> float | None:
        """Return when there was time enough for what it is about; see Timed."""
        bounds = self.clients.bounds
        if self._over:
            has_read = not self.transport.get_write_buffer_size()
            return self._since + (_LINGER_S if has_read else _LINGER_MOST_S)
        if self._in_body:
            if self.flow.read_paused or self._reading.is_full:
                self._since += elapsed  # it may not send
            return self._since + bounds.body_s + self._received / _LEAST_RATE
        if self._head is not None or self.cycle is None:
            return self._since + bounds.head_s
        return None

    def on_overdue(self) -> None:
        """Give it up."""
        bounds = self.clients.bounds
        if self._over:
            self.transport.abort()
        elif self._in_body:
            said = (
                f"{self._received} bytes of the body came in {self.loop.time() - self._since:.0f} s, which is too slow"
            )
            self._refuse(
                RefusalReason.BODY_TIMEOUT,
                TooSlow(f"{said}: a body has {bounds.body_s:g} s, and one more for each {_LEAST_RATE} bytes"),
            )
        elif self._head is not None and self._head.strip(b"\r\n"):  # empty lines are none (RFC 9112, 2.2)
            error = TooSlow(f"the head of the request was not complete within {bounds.head_s:g} s")
            self._target = target_in(self._head)
            self._refuse(RefusalReason.HEAD_TIMEOUT, error)
        else:  # it has asked for nothing, and so gets no answer that it could take for another one's
            self._stop()
            self.clients.on_refused(RefusalReason.HEAD_TIMEOUT)
            self.transport.close()

    def _stop(self) -> None:
        """Take nothing more that it sends, on whichever way."""
        self._over, self.between = True, False

    def _refuse(self, fault: RefusalReason, error: ProxyError) -> None:
        """Answer what will not be served, if it has no answer yet, and read no more of it."""
        self._stop()
        self.clients.on_refused(fault)
        level = logging.DEBUG if isinstance(error, TooManyConnections) else logging.INFO  # a crowd is counted
        logger.log(level, "a connection of %s is closed: %s", self.client[0] if self.client else "a client", error)
        self._head = self._left = None
        self.free()
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete  # of this request: none is read behind another
        if is_open and getattr(cycle, "response_started", False):
            self.transport.close()  # half of an answer has no other end
        elif is_open or not self._in_body:
            self.transport.write(self._answer(error))
        if is_open and cycle is not None:
            cycle.disconnected = True
            if hasattr(cycle, "waiting_for_100_continue"):  # uvicorn's, whose task may not have begun to read
                cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        self._linger()

    def _answer(self, error: ProxyError) -> bytes:
        status, content_type, body = error_body(error, path_of(self._target), self.clients.bounds.overload)
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
        return b"".join([STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in headers], b"\r\n", body])

    def _linger(self) -> None:
        """Close such that the client reads the answer: what it still sends would make the kernel take it back."""
        if self.transport.is_closing():
            return
        self._since = self.loop.time()
        self.clients.watch(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._reading.is_full = False
            self.transport.resume_reading()
        else:  # TLS says goodbye, and reads on until that is answered
            self.transport.close()


def path_of(target: bytes) -> str:
    """Return the path in the target of a request: without a host and a query, and without escapes; empty: none."""
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserInvalidURLError:
        return ""
    return unquote(path.decode("ascii")) if path else ""
