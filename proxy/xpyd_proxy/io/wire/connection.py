"""One connection to an engine. httptools and its exceptions stop at this file.

llhttp, which httptools wraps, is strict about most of what an answer may look like: two lengths, a length and chunks at
once, folded lines, bare line feeds, control characters. The rest is here: the transfer coding, the version, statuses
below 100, interim answers with a body, how long a head or a trailer may be, and how an answer without a length ends.
"""

import asyncio
import select
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from xpyd_proxy.core.address import Address
from xpyd_proxy.errors import EngineError
from xpyd_proxy.io.wire.response_handler import ResponseHandler
from xpyd_proxy.io.wire.simple_response import CONTENT_TYPE, match_simple_response, parse_single_chunk

HEAD_MOST: Final = 64 * 1024  # bytes of a head, and of anything else between two pieces of a body
_BODYLESS: Final = frozenset({204, 304})


class _Unclear(Exception):
    """The answer is not one that we follow; says why."""


class Owner(Protocol):
    """Keeps connections; the calls never wait and never raise."""

    def opened(self, connection: "Connection", /) -> None:
        """It can be used."""
        ...

    def ended(self, connection: "Connection", /) -> None:
        """It can be used no more: once, and as soon as that is known."""
        ...

    def closed(self, connection: "Connection", /) -> None:
        """Its socket is closed: once, and after it has ended."""
        ...


class Connection:
    """Sends one request at a time, and gives what comes back to its ResponseHandler. It is an asyncio.Protocol.

    It is not derived from that class: mypyc would not clear weak references to what is.
    """

    __deletable__ = ("_parser",)  # mypyc wants to know
    _transport: asyncio.Transport  # nobody gets the connection before it has one

    def __init__(self, address: Address, owner: Owner) -> None:
        self.address = address
        self.idle_since = 0.0  # on the loop's clock, as its owner says
        self.heard_at = 0.0  # on the same clock: when a request was sent, some of its answer came, or reading went on
        self._clock = asyncio.get_running_loop().time
        self._owner = owner
        self._poll = select.poll()
        self._parser = HttpResponseParser(self)
        self._reply: ResponseHandler | None = None
        self._pieces: list[bytes] = []
        self._loose = 0  # bytes since the last piece of a body
        self._parsing = False  # the parser has had some of the answer
        self._between = False  # and is behind a chunk, with nothing of the next
        self._usable = True  # as far as we know another request may be sent when this one is done
        self._ended = False
        self._held_up = False  # the engine has to wait
        self._is_tls = False
        self._paused = False  # there is too much to write
        self._unwritten = False  # the engine has closed it before the request could be written
        self._forget_head()

    # For its owner

    @property
    def idle(self) -> bool:
        """Tell whether it has no request."""
        return self._reply is None

    @property
    def reusable(self) -> bool:
        """Tell whether another request may be sent."""
        done = self._reply is None or self._reply.complete
        return self._usable and done and not self._transport.get_write_buffer_size()

    @property
    def held_up(self) -> bool:
        """Tell whether the engine has to wait for us."""
        return self._held_up

    @property
    def silent(self) -> bool:
        """Tell whether nothing waits to be read, not even the engine's end of the connection."""
        return not self._poll.poll(0)

    def start(self, call: ResponseHandler, head: bytes, body: Sequence[bytes | memoryview]) -> bool:
        """Send a request at once, however long it is, and tell ``call`` of its answer; False: it is over.

        ``body``: its pieces. Several are written in one go, and not copied for it.
        """
        transport = self._transport
        if transport.is_closing():
            return False
        self._reply, call.source = call, self
        self.heard_at = self._clock()
        first = body[0]
        if len(body) == 1 and isinstance(first, bytes):
            transport.write(head + first)
        else:
            transport.writelines([head, *body])
        self._unwritten = transport.is_closing()
        return True

    @property
    def is_sent(self) -> bool:
        """Tell whether the engine has all of the request, or will have it in a moment."""
        return not (self._paused or self._unwritten)

    def rest(self) -> None:
        """Let go of the request; another may follow."""
        self._reply = None
        self._loose = 0
        if self._held_up:
            self.resume_reading()

    def pause_reading(self) -> None:
        """Let the engine wait."""
        self._held_up = True
        if self._is_tls and (self._reply is None or self._reply.complete):
            self._usable = False  # what comes now is read, and neither decrypted nor seen by ``silent``
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self._held_up:
            self.heard_at = self._clock()  # nothing could be heard before
        self._held_up = False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def give_up(self, error: EngineError) -> bool:
        """Close it, and give whoever waits for an answer that error; tell whether somebody did."""
        reply = self._reply
        if reply is None or reply.complete or reply.error is not None:
            return False
        reply.give_up(error)
        return True

    def abort(self) -> None:
        """Close it at once; whoever waits for an answer gets an error."""
        self._transport.abort()
        self._end(None)

    def dismiss(self) -> None:
        """Forget a connection that nobody has got, whether or not the event loop will tell its end."""
        if hasattr(self, "_transport"):
            self.abort()
        self._closed()

    # For the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)  # create_connection makes no other
        self._owner.opened(self)
        sock = None if transport.is_closing() else transport.get_extra_info("socket")
        if sock is None:  # it was reset as it opened: a uvloop transport has no socket then
            self._usable = False
            transport.close()
        else:
            self._poll.register(sock.fileno(), select.POLLIN)
            self._is_tls = transport.get_extra_info("ssl_object") is not None

    def data_received(self, data: bytes) -> None:
        """Take what the engine has sent."""
        reply = self._reply
        if reply is None or reply.complete:
            self._unasked()
            return
        self.heard_at = self._clock()
        body = None if self._parsing else match_simple_response(data)
        if body is not None:
            self._take_whole(reply, body)
            return
        self._parsing = True
        self._loose += len(data)
        fault = self._feed(data)
        # What ends so is no half of a size: a whole one would have begun a chunk.
        self._between = self._between and fault is None and data.endswith(b"\r\n")
        try:
            if self._pieces:
                pieces, self._pieces = self._pieces, []
                reply.arrived(pieces[0] if len(pieces) == 1 else b"".join(pieces), last=self._done)
            if self._done:
                self._answered(reply, clean=fault is None)
                return
        except Exception as bug:  # noqa: BLE001 (whatever it is, it is not the engine's: who is told says what follows)
            self._crash(reply, bug)
            return
        if fault is not None:
            error = EngineError(f"{reply.engine} answered with something that is not HTTP/1.1: {fault}")
            error.__cause__ = fault
            reply.give_up(error)

    def _take_whole(self, reply: ResponseHandler, body: bytes) -> None:
        """Take an answer that is here all at once."""
        self._done = self._keeps = True
        try:
            reply.began(200, CONTENT_TYPE, b"")
            if body:
                reply.arrived(body, last=True)
            self._answered(reply, clean=True)
        except Exception as bug:  # noqa: BLE001 (as above)
            self._crash(reply, bug)

    def _crash(self, reply: ResponseHandler, bug: Exception) -> None:
        reply.crashed(bug)
        if self._reply is reply:
            self.abort()

    def eof_received(self) -> None:
        """Note that the engine sends no more: the end of an answer without a length, and of no other."""
        reply = self._reply
        if reply is None or reply.complete:
            self._unasked()
        elif self._until_eof:
            self._answered(reply, clean=False)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that it is over."""
        self._end(exc)
        self._closed()

    def pause_writing(self) -> None:
        """Write no more for now."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on."""
        self._paused = False

    def _feed(self, data: bytes) -> Exception | None:
        """Parse, and return what is wrong with it."""
        if self._between and (piece := parse_single_chunk(data)) is not None:
            self.on_body(piece)
            return None
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            return _Unclear("it changes the protocol")
        except HttpParserError as exc:
            mine = exc.__context__
            fault = mine if isinstance(mine, _Unclear) else exc
            return fault.with_traceback(None)  # it leads to our caller, who holds the fault: a circle
        if self._loose > HEAD_MOST and not self._done:
            return _Unclear(f"a head of more than {HEAD_MOST} bytes")
        return None

    def _answered(self, reply: ResponseHandler, *, clean: bool) -> None:
        self._usable = self._usable and clean and self._keeps and not (self._is_tls and self._held_up)
        self._forget_head()
        self._parsing = False
        reply.ended()

    def _closed(self) -> None:
        self._owner.closed(self)
        if hasattr(self, "_parser"):
            del self._parser  # the two hold each other, and would wait for the garbage collector

    def _unasked(self) -> None:
        """Drop a connection on which something comes that nobody asked for; an answer is never made of it."""
        self._usable = False
        if self._reply is None:
            self.abort()

    def _end(self, exc: BaseException | None) -> None:
        if self._ended:
            return
        self._ended, self._usable = True, False
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.broke_off(exc)
        self._owner.ended(self)

    # For the parser

    def _forget_head(self) -> None:
        self._status = 0
        self._content_type = self._load = b""
        self._codings: list[bytes] = []
        self._has_length = False
        self._head_size = 0
        self._headed = self._done = self._keeps = self._until_eof = self._between = False

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request."""
        if self._done:
            self._refuse("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take what matters from a header, or bound a trailer."""
        if self._loose > HEAD_MOST:  # what came with it may be body
            self._head_size += len(name) + len(value)
            if self._head_size > HEAD_MOST:
                self._refuse(f"a head of more than {HEAD_MOST} bytes")
        if name in _IGNORED:
            return
        read = _READ.get(name.lower())
        if read is None:
            if len(_IGNORED) < _IGNORED_MOST:
                _IGNORED.add(name)
        elif not self._headed:
            read(self, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        """Decide how the answer ends; refuse it where that is not clear."""
        status = self._parser.get_status_code()
        version = self._parser.get_http_version()
        if status == 101 or not 100 <= status < 1000:
            self._refuse(f"status {status:03}")
        if version not in ("1.1", "1.0"):
            self._refuse(f"version {version}")
        framed = self._has_length or bool(self._codings)
        if status < 200:
            if framed:
                self._refuse(f"status {status} with a body")
            self._status = status
            return
        if self._codings and (version == "1.0" or [one.lower() for one in self._codings] != [b"chunked"]):
            self._refuse("a transfer coding other than chunked")
        self._status, self._headed, self._loose = status, True, 0
        self._until_eof = not framed and status not in _BODYLESS
        if self._until_eof and self._is_tls:  # whoever sits in between can end the connection
            self._refuse("an answer without a length over TLS, whose end cannot be told from a cut")
        if self._reply is not None:
            self._reply.began(status, self._content_type, self._load)

    def on_body(self, piece: bytes) -> None:
        """Keep a piece until all that came with it is parsed."""
        self._loose = 0
        self._pieces.append(piece)

    def on_chunk_header(self) -> None:
        """Note that the parser has begun a chunk."""
        self._between = False

    def on_chunk_complete(self) -> None:
        """Note that it is behind one."""
        self._between = True

    def on_message_complete(self) -> None:
        """Note the end of an answer, or of an interim one, which nobody needs."""
        if not self._headed:
            self._forget_head()
            return
        self._done = True
        stray = self._status in _BODYLESS and (bool(self._codings) or (self._status == 204 and self._has_length))
        self._keeps = self._parser.should_keep_alive() and not stray

    def take_content_type(self, value: bytes) -> None:
        """Several are joined: nobody can tell which one is meant."""
        self._content_type = self._content_type + b", " + value if self._content_type else value

    def take_load(self, value: bytes) -> None:
        """The engine says how busy it is."""
        self._load = self._load + b", " + value if self._load else value

    def take_length(self, _value: bytes) -> None:
        """The parser has read the length, and refuses a second one."""
        self._has_length = True

    def take_coding(self, value: bytes) -> None:
        """The parser follows it only if it is what we expect."""
        self._codings.append(value)

    def take_compression(self, value: bytes) -> None:
        """Whoever reads the answer would take it for what it says."""
        if value.lower() not in (b"", b"identity"):
            self._refuse("a content coding, and none was asked for")

    def _refuse(self, why: str) -> NoReturn:
        raise _Unclear(why)


_IGNORED: Final[set[bytes]] = set()  # names of headers that say nothing to us, as engines write them
_IGNORED_MOST: Final = 64
_READ: Final[dict[bytes, Callable[[Connection, bytes], None]]] = {
    b"content-type": Connection.take_content_type,
    b"endpoint-load-metrics": Connection.take_load,
    b"content-length": Connection.take_length,
    b"transfer-encoding": Connection.take_coding,
    b"content-encoding": Connection.take_compression,
}
