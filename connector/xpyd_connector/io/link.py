"""Control connections over TCP: one selector, owned by one thread, that never blocks on a peer."""

import contextlib
import errno
import itertools
import os
import queue
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from xpyd_connector.core.greeting import NONCE_BYTES, Guest, Host
from xpyd_connector.core.ids import Address, ConnId
from xpyd_connector.core.messages import MAX_FRAME, MAX_STRANGER, Challenge, Message, Welcome, decode, encode
from xpyd_connector.core.ports import Failed, LinkEvent, Lost, Met, Received
from xpyd_connector.errors import PeerError, SettingsError
from xpyd_connector.io.framing import Deframer, frame
from xpyd_connector.io.meeting import meet

MAX_UNSENT = 16 << 20  # bytes a peer may leave unread before we close its connection
MAX_STRANGERS = 256  # connections that have not said a valid Hello
USER_TIMEOUT_MS = 20_000  # a peer that acknowledges nothing for so long is gone (cut network, lost machine)
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # s, s, probes: the same, where nobody talks
# What the system says of a peer that says nothing: it may well be alive behind a network that is cut.
SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
_Meeting = tuple[socket.socket, Welcome]


@dataclass(slots=True)
class _Conn:
    id: ConnId
    sock: socket.socket
    inbox: Deframer
    outbox: bytearray = field(default_factory=bytearray)
    nonce: bytes = b""  # what a stranger's Hello must prove; empty once greeted
    greet_by: float = float("inf")  # when a stranger is sent away
    closing: bool = False  # close once the outbox is empty


class SocketLink:
    """Implements :class:`~xpyd_connector.core.ports.Link`. All but :meth:`wake` belong to the owning thread."""

    def __init__(self, guest: Guest, *, timeout: float, threads: int) -> None:
        self._guest = guest
        self._timeout = timeout
        self._pool = ThreadPoolExecutor(threads, "xpyd-handshake")
        self._host: Host | None = None  # absent on an engine that lends nothing
        self._ids = map(ConnId, itertools.count(1))
        self._conns: dict[ConnId, _Conn] = {}
        self._meeting: set[ConnId] = set()
        self._met: queue.SimpleQueue[tuple[ConnId, Future[_Meeting]]] = queue.SimpleQueue()
        self._events: deque[LinkEvent] = deque()
        self._stopped = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.settimeout(0)
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    def listen(self, address: Address, host: Host) -> Address:
        """Accept decode engines; returns the bound address. Raises ``SettingsError`` if the port cannot be had."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(512)
        except (OSError, OverflowError) as exc:  # OverflowError: the data-parallel rank leads beyond the last port
            listener.close()
            raise SettingsError(
                f"the side channel cannot listen on {address}: {exc}; set VLLM_NIXL_SIDE_CHANNEL_HOST to an "
                "address of this machine and VLLM_NIXL_SIDE_CHANNEL_PORT to a port that is free"
            ) from exc
        listener.settimeout(0)
        self._host = host
        self._selector.register(listener, selectors.EVENT_READ, listener)
        return Address(*listener.getsockname()[:2])

    def meet(self, peer: Address) -> ConnId:
        """Start connecting on a pool thread."""
        conn = next(self._ids)
        self._meeting.add(conn)
        future = self._pool.submit(meet, peer, self._guest, timeout=self._timeout)
        future.add_done_callback(lambda done: self._report(conn, done))
        return conn

    def _report(self, conn: ConnId, done: Future[_Meeting]) -> None:
        """On the pool thread: a meeting ended."""
        self._met.put((conn, done))
        self.wake()
        if self._stopped:  # nobody polls any more
            self._take_meetings()

    def send(self, conn: ConnId, message: Message) -> None:
        """Queue a message and send what the socket takes now."""
        if (found := self._conns.get(conn)) is None:
            return  # its Lost is on the way, or has been told
        if len(found.outbox) > MAX_UNSENT:  # before this message: a Welcome alone may be larger
            self._lose(found, f"it left {len(found.outbox)} bytes unread", silent=True)
            return
        found.outbox += frame(encode(message))
        self._flush(found)

    def close(self, conn: ConnId) -> None:
        """Close a connection, or give up opening it."""
        self._meeting.discard(conn)
        if (found := self._conns.get(conn)) is not None:
            self._drop(found)
        self._events = deque(event for event in self._events if event.conn != conn)

    def wake(self) -> None:
        """Make a running or coming :meth:`poll` return at once. Any thread may call it."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: nobody polls
            self._wake_out.send(b"\0")

    def poll(self, timeout: float | None) -> Iterator[LinkEvent]:
        """Wait at most ``timeout`` seconds (None: for ever) for something to happen, and return what did.

        A connection that is closed while the events are taken in has none after that.
        """
        for key, ready in self._selector.select(0 if self._events else self._bounded(timeout)):
            self._handle(key, ready)
        self._take_meetings()
        self._send_strangers_away()
        return self._take_events()

    def stop(self) -> None:
        """Close every socket and the pool. A meeting under way ends by itself, within its time."""
        self._meeting.clear()  # before the flag: from then on a pool thread closes what it has opened
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wake_out.close()
        self._selector.close()
        self._conns.clear()
        self._take_meetings()

    def _take_events(self) -> Iterator[LinkEvent]:
        while self._events:
            yield self._events.popleft()

    def _bounded(self, timeout: float | None) -> float | None:
        strangers = [conn.greet_by for conn in self._strangers()]
        if not strangers:
            return timeout
        left = max(0.0, min(strangers) - time.monotonic())
        return left if timeout is None else min(timeout, left)

    def _handle(self, key: selectors.SelectorKey, ready: int) -> None:
        if isinstance(key.data, _Conn):
            if ready & selectors.EVENT_WRITE:
                self._flush(key.data)
            if ready & selectors.EVENT_READ and key.data.id in self._conns:
                self._read(key.data)
        elif isinstance(key.data, socket.socket):
            self._accept(key.data)
        else:
            with contextlib.suppress(BlockingIOError):
                while self._wake_in.recv(4096):
                    pass

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # the caller went away before we looked
        if sum(1 for _ in self._strangers()) >= MAX_STRANGERS:
            sock.close()
            return
        conn = self._adopt(next(self._ids), sock, MAX_STRANGER)
        conn.nonce, conn.greet_by = os.urandom(NONCE_BYTES), time.monotonic() + self._timeout
        self.send(conn.id, Challenge(conn.nonce))

    def _adopt(self, id_: ConnId, sock: socket.socket, limit: int) -> _Conn:
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {"TCP_USER_TIMEOUT": USER_TIMEOUT_MS, **KEEPALIVE}.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        conn = self._conns[id_] = _Conn(id_, sock, Deframer(limit))
        self._selector.register(sock, selectors.EVENT_READ, conn)
        return conn

    def _take_meetings(self) -> None:
        while (ended := self._next_meeting()) is not None:
            conn, future = ended
            if conn not in self._meeting:
                if not future.cancelled() and future.exception() is None:
                    future.result()[0].close()  # nobody wants it any more
                continue
            self._meeting.discard(conn)
            try:
                sock, welcome = future.result()
            except PeerError as exc:
                self._events.append(Failed(conn, str(exc)))
            else:
                self._adopt(conn, sock, MAX_FRAME)
                self._events.append(Met(conn, welcome))

    def _next_meeting(self) -> tuple[ConnId, Future[_Meeting]] | None:
        try:
            return self._met.get_nowait()
        except queue.Empty:
            return None

    def _read(self, conn: _Conn) -> None:
        try:
            data = conn.sock.recv(1 << 18)
            if not data:
                self._lose(conn, "it closed the connection")
                return
            for message in conn.inbox.feed(data):
                if conn.id in self._conns:  # the answer to the message before may have found the peer gone
                    self._received(conn, decode(message))
        except BlockingIOError:
            return
        except OSError as exc:
            self._lose(conn, str(exc), silent=exc.errno in SILENT)
        except PeerError as exc:
            self._lose(conn, str(exc), silent=True)

    def _received(self, conn: _Conn, message: Message) -> None:
        if not conn.nonce:
            self._events.append(Received(conn.id, message))
        elif self._host is not None and not conn.closing:  # whoever was refused stays a stranger
            answer = self._host.answer(message, conn.nonce)
            if isinstance(answer, Welcome):
                conn.nonce, conn.greet_by, conn.inbox.limit = b"", float("inf"), MAX_FRAME
            else:
                conn.closing = True
            self.send(conn.id, answer)

    def _flush(self, conn: _Conn) -> None:
        try:
            while conn.outbox:
                del conn.outbox[: conn.sock.send(conn.outbox)]
        except BlockingIOError:
            pass
        except OSError as exc:
            self._lose(conn, str(exc), silent=exc.errno in SILENT)
            return
        if conn.closing and not conn.outbox:
            self._drop(conn)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if conn.outbox else 0)
        if self._selector.get_key(conn.sock).events != wanted:
            self._selector.modify(conn.sock, wanted, conn)

    def _strangers(self) -> Iterator[_Conn]:
        return (conn for conn in self._conns.values() if conn.nonce)

    def _send_strangers_away(self) -> None:
        now = time.monotonic()
        for conn in [conn for conn in self._strangers() if now >= conn.greet_by]:
            self._drop(conn)

    def _lose(self, conn: _Conn, reason: str, *, silent: bool = False) -> None:
        if not conn.nonce:
            self._events.append(Lost(conn.id, reason, silent))
        self._drop(conn)

    def _drop(self, conn: _Conn) -> None:
        if self._conns.pop(conn.id, None) is not None:
            self._selector.unregister(conn.sock)
            conn.sock.close()
