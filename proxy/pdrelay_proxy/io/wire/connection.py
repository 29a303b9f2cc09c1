"""One connection to an engine: sends a request, and passes the response to a handler as it
comes.
"""

import asyncio
import select
from collections.abc import Sequence
from typing import Final, Protocol, cast

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.io.wire.request_head import Heads
from pdrelay_proxy.io.wire.response_handler import ResponseHandler
from pdrelay_proxy.io.wire.response_reader import ResponseReader
from pdrelay_proxy.io.wire.simple_response import CONTENT_TYPE, SimpleResponses, parse_single_chunk

# An engine that closes an idle connection as a request is written to it: the end is seen within one
# round trip. Later, the engine has read the request and failed it.
STALE_S: Final = 1.0


class Owner(Protocol):
    """Keeps connections; its methods neither wait nor raise."""

    def opened(self, connection: "Connection", /) -> None:
        """Note that it can be used."""
        ...

    def ended(self, connection: "Connection", /) -> None:
        """Note that it can be used no more: called once, as soon as that is known."""
        ...

    def stale(self, connection: "Connection", /) -> None:
        """Note that it was closed under a request, as idle connections are: called before
        ``ended``.
        """
        ...

    def closed(self, connection: "Connection", /) -> None:
        """Note that its socket is closed: called once, after ``ended``."""
        ...


class Peer:
    """What the pool keeps of an address: idle connections, the last used last, and heads."""

    __slots__ = ("address", "heads", "idle", "is_forgotten", "responses")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.idle: list[Connection] = []
        self.heads = Heads(address)
        self.responses = SimpleResponses()
        # the pool has dropped it, as no connection waited: the next request gets a new Peer
        self.is_forgotten = False


class Connection:
    """Sends one request at a time, and passes the response to its ResponseHandler.

    It implements asyncio.Protocol, but does not inherit from it: mypyc would not clear weak
    references to a subclass.
    """

    _transport: asyncio.Transport  # set before the connection is given out

    def __init__(self, peer: Peer, owner: Owner) -> None:
        self.peer = peer  # the engine's address
        self.clock = asyncio.get_running_loop().time
        # when it opened, or last sent a request, received bytes or resumed reading
        self.heard_at = self.clock()
        self._owner = owner
        self._poll = select.poll()
        self._reader = ResponseReader(peer.responses)
        self._reply: ResponseHandler | None = None
        self._begun = False  # the handler has got the head
        self._usable = True  # may send another request when this one is done
        self._ended = False
        self.held_up = False  # reading is paused: the engine has to wait for us
        self._paused = False  # the transport's write buffer is full
        self._is_reused = False  # it has served a request before this one
        self._unwritten = False  # the engine has closed it before the request could be written

    # For its owner

    @property
    def idle(self) -> bool:
        """Whether it has no request."""
        return self._reply is None

    def is_silent(self) -> bool:
        """Return whether nothing waits to be read, not even the engine's end of the connection."""
        return not self._poll.poll(0)

    def start(self, call: ResponseHandler, head: bytes, body: Sequence[bytes | memoryview]) -> bool:
        """Write a request at once, however long it is, and pass its response to ``call``.

        Return False if the connection is closing. ``body``: its pieces; several are written in one
        call, without a copy.
        """
        transport = self._transport
        if transport.is_closing():
            return False
        self._reply = call
        call.source = self
        self.heard_at = self.clock()
        first = body[0]
        if len(body) == 1 and isinstance(first, bytes):
            transport.write(head + first)
        else:
            transport.writelines([head, *body])
        self._unwritten = transport.is_closing()
        return True

    @property
    def is_sent(self) -> bool:
        """Whether the engine has all of the request, or will have it in a moment."""
        return not (self._paused or self._unwritten)

    def rest(self) -> bool:
        """Let go of an answered request; return whether another may follow."""
        done = self._reply is None or self._reply.complete
        if not (self._usable and done) or self._transport.get_write_buffer_size():
            return False
        self._reply = None
        self._is_reused = True
        self._reader.unbounded_bytes = 0
        if self.held_up:
            self.resume_reading()
        return True

    def pause_reading(self) -> None:
        """Pause reading: the engine has to wait."""
        self.held_up = True
        if self._reader.is_tls and (self._reply is None or self._reply.complete):
            # bytes that come now are read, but neither decrypted nor seen by ``is_silent``
            self._usable = False
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self.held_up:
            self.heard_at = self.clock()  # while paused it received nothing
        self.held_up = False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def give_up(self, error: EngineError) -> bool:
        """Close it, and fail its request, if there is one; return whether there was."""
        reply = self._reply
        if reply is None or reply.complete or reply.error is not None:
            return False
        reply.give_up(error)
        return True

    def abort(self) -> None:
        """Close it at once; an unanswered request fails."""
        self._transport.abort()
        self._end(None)

    def dismiss(self) -> None:
        """Forget a connection that was never given out, whether or not the event loop will call
        ``connection_lost``.
        """
        if hasattr(self, "_transport"):
            self.abort()
        self._closed()

    # For the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # create_connection makes no other
        self._owner.opened(self)
        sock = None if transport.is_closing() else transport.get_extra_info("socket")
        if sock is None:  # it was reset as it opened: a uvloop transport has no socket then
            self._usable = False
            transport.close()
        else:
            self._poll.register(sock.fileno(), select.POLLIN)
            self._reader.is_tls = transport.get_extra_info("ssl_object") is not None

    def data_received(self, data: bytes) -> None:
        """Pass on the engine's bytes."""
        reply = self._reply
        if reply is None or reply.complete:
            self._drop_unsolicited()
            return
        self.heard_at = self.clock()
        try:
            piece = parse_single_chunk(data) if self._reader.between else None
            if piece is None:
                self._read(reply, data)
            else:
                self._reader.unbounded_bytes = 0
                reply.chunk_arrived(data, piece)
        except Exception as bug:  # noqa: BLE001 (a bug of the handler, not of the engine: the handler decides what follows)
            self._crash(reply, bug)

    def _read(self, reply: ResponseHandler, data: bytes) -> None:
        """Pass on bytes that are not exactly one chunk."""
        reader = self._reader
        body = None if reader.in_response else self.peer.responses.match(data)
        if body is not None:
            # the reader has not seen this response
            self._usable = self._usable and not (reader.is_tls and self.held_up)
            reply.arrived_whole(CONTENT_TYPE, body)
            return
        fault = reader.feed(data)
        if reader.headed and not self._begun:
            self._begun = True
            reply.began(reader.status, reader.content_type, reader.load)
        if reader.pieces:
            pieces = reader.pieces
            reader.pieces = []
            reply.arrived(pieces[0] if len(pieces) == 1 else b"".join(pieces), last=reader.done)
        if reader.done:
            self._answered(reply, clean=fault is None)
        elif fault is not None:
            error = EngineError(
                f"{reply.engine} answered with something that is not HTTP/1.1: {fault}"
            )
            error.__cause__ = fault
            reply.give_up(error)

    def _crash(self, reply: ResponseHandler, bug: Exception) -> None:
        reply.crashed(bug)
        if self._reply is reply:
            self.abort()

    def eof_received(self) -> None:
        """Note that the engine sends no more: only a response without a length is whole."""
        reply = self._reply
        if reply is None or reply.complete:
            self._drop_unsolicited()
        elif self._reader.until_eof:
            reply.until_close = True
            self._answered(reply, clean=False)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is over."""
        self._end(exc)
        self._closed()

    def pause_writing(self) -> None:
        """Note that the write buffer is full."""
        self._paused = True

    def resume_writing(self) -> None:
        """Resume writing."""
        self._paused = False

    def _answered(self, reply: ResponseHandler, *, clean: bool) -> None:
        reader = self._reader
        self._usable = (
            self._usable and clean and reader.keeps and not (reader.is_tls and self.held_up)
        )
        reader.forget_head()
        self._begun = False
        reply.ended()

    def _closed(self) -> None:
        self._owner.closed(self)
        self._reader.close()

    def _drop_unsolicited(self) -> None:
        """Drop a connection that received bytes without a request; they never become a response."""
        self._usable = False
        if self._reply is None:
            self.abort()

    def _end(self, exc: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._usable = False
        reply = self._reply
        self._reply = None
        if reply is not None:
            is_unheard = self._is_reused and not self._reader.in_response
            is_stale = is_unheard and self.clock() - self.heard_at < STALE_S
            if is_stale:
                self._owner.stale(self)
            reply.broke_off(exc, was_stale=is_stale, was_sent=self.is_sent)
        self._owner.ended(self)
