"""Control connections over TCP: one selector, owned by one thread, that never blocks on a peer."""

import contextlib
import errno
import itertools
import os
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from pdrelay_connector.core.addresses import is_elsewhere, plain_ip
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import earliest
from pdrelay_connector.core.ids import Address, ConnId, EngineId
from pdrelay_connector.core.messages import (
    MAX_FRAME,
    MAX_UNAUTHENTICATED_FRAME,
    PROTOCOL,
    Challenge,
    Message,
    Refusal,
    decode,
    encode,
)
from pdrelay_connector.core.ports import (
    ConnectFailed,
    ConnectionLost,
    LinkEvent,
    MessageReceived,
    PeerConnected,
)
from pdrelay_connector.core.session.handshake import (
    NONCE_BYTES,
    Accepted,
    HandshakeClient,
    HandshakeServer,
    ServerConnection,
)
from pdrelay_connector.errors import (
    AnotherEngine,
    IncompatiblePeer,
    PeerError,
    PortClosed,
    SettingsError,
)
from pdrelay_connector.io.client_connections import (
    IDLE_TIMEOUT,
    ClientConnections,
    UnauthenticatedConnections,
)
from pdrelay_connector.io.connection import Connection, set_socket_options
from pdrelay_connector.io.framing import Deframer, frame
from pdrelay_connector.io.opener import ConnectionOpener
from pdrelay_connector.io.tls import Tls
from pdrelay_connector.io.tls_records import MAX_UNAUTHENTICATED_RECORDS, TlsRecords

MAX_UNSENT = 16 << 20  # bytes a peer may leave unread before we close its connection
# TLS records of one connection before the next one's turn: 1 MiB, or 2 ms of key updates
MAX_READS = 64
# s without accept() when the system has no descriptors: it would fail again at once, in a busy loop
ACCEPT_PAUSE = 1.0
# Errors of the network between us and a peer: the peer itself may still run. A reset is one, too: a
# kernel that has given up a cut connection (TCP_USER_TIMEOUT, keepalive) answers so when the cut is
# mended, and so may a firewall.
RESET = frozenset({errno.ECONNRESET, errno.ECONNABORTED})
SILENT = RESET | {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
}
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class SocketLink:
    """Implements :class:`~pdrelay_connector.core.ports.Link`.

    All but :meth:`wake` belong to the owning thread.
    """

    def __init__(
        self,
        client: HandshakeClient,
        tls: Tls,
        counters: Counters,
        *,
        timeout: float,
        threads: int,
        local_only: bool = False,
    ) -> None:
        self._tls = tls
        self._counters = counters
        self._timeout = timeout
        self._opener = ConnectionOpener(
            client, tls, self.wake, timeout=timeout, threads=threads, local_only=local_only
        )
        self._server: HandshakeServer | None = None  # absent on an engine that does not listen
        self._listener: socket.socket | None = None  # likewise
        self._accept_at: float | None = None  # when to accept again; absent while we do
        self._ids = map(ConnId, itertools.count(1))
        self._conns: dict[ConnId, Connection] = {}
        self._unauthenticated = UnauthenticatedConnections()
        self._clients = ClientConnections()
        # their TLS may hold bytes that the selector cannot see
        self._unread: dict[ConnId, Connection] = {}
        self._events: deque[LinkEvent] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.settimeout(0)
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    def listen(self, address: Address, server: HandshakeServer) -> Address:
        """Accept connections, and return the bound address.

        Raises ``SettingsError`` if the port cannot be bound.
        """
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(512)
        except (OSError, OverflowError) as exc:
            # OverflowError: port plus data-parallel rank exceeds 65535
            listener.close()
            raise SettingsError(
                f"the side channel cannot listen on {address}: {exc}; set "
                f"VLLM_NIXL_SIDE_CHANNEL_HOST to an "
                "address of this machine and VLLM_NIXL_SIDE_CHANNEL_PORT to a port that is free"
            ) from exc
        listener.settimeout(0)
        self._server = server
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, listener)
        return Address(*listener.getsockname()[:2])

    def connect(self, peer: Address, engine: EngineId) -> ConnId:
        """Start to connect on a pool thread."""
        conn = next(self._ids)
        self._opener.open(conn, peer, engine)
        return conn

    def send(self, conn: ConnId, message: Message) -> None:
        """Queue a message, and send as much as the socket takes now."""
        if (connection := self._conns.get(conn)) is None:
            return  # its ConnectionLost is queued or handled
        # checked before this message: a Welcome alone may be larger
        if connection.tls.unsent > MAX_UNSENT:
            self._lose(connection, f"it left {connection.tls.unsent} bytes unread", silent=True)
            return
        connection.tls.write(frame(encode(message)))
        self._flush(connection)

    def close(self, conn: ConnId) -> None:
        """Close a connection, or stop to open it."""
        self._opener.cancel(conn)
        self._clients.forget(conn)
        if (connection := self._conns.get(conn)) is not None:
            self._drop(connection)
        self._events = deque(event for event in self._events if event.conn != conn)

    def close_all(self, reason: str) -> None:
        """Close every connection, also those that are being opened, and refuse others."""
        self._opener.cancel_all()
        for conn in list(self._conns.values()):
            self._drop(conn)
            self._clients.forget(conn.id)
        self._events.clear()
        self._unread.clear()
        if self._server is not None:
            self._server = replace(self._server, closed=reason)

    def are_of_one_engine(self, first: ConnId, second: ConnId) -> bool:
        """Whether processes of one engine opened these two connections, as their Hellos prove.

        A closed connection counts until its :class:`ConnectionLost` has been handled, for its last
        messages.
        """
        return self._clients.are_of_one_engine(first, second)

    def engine_of(self, conn: ConnId) -> EngineId | None:
        """Return the engine that opened a connection, as its Hello proves."""
        return self._clients.engine_of(conn)

    def wake(self) -> None:
        """Make the current or the next :meth:`poll` return at once. Any thread may call it."""
        # full: poll() returns anyway; closed: poll() has ended
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b"\0")

    def poll(self, timeout: float | None) -> Iterator[LinkEvent]:
        """Wait at most ``timeout`` seconds (None: for ever) for events, and return them.

        A connection that the caller closes between two events has no event after that.
        """
        for key, ready in self._selector.select(
            0 if self._events or self._unread else self._bounded(timeout)
        ):
            self._handle(key, ready)
        unread = self._unread
        self._unread = {}
        for conn in unread.values():
            if conn.id in self._conns:
                self._read(conn)
        self._add_opened()
        self._check_deadlines(time.monotonic())
        return self._take_events()

    def stop(self) -> None:
        """Close every socket and the pool.

        An attempt to connect ends by itself, within its timeout.
        """
        self._opener.stop()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wake_out.close()
        self._selector.close()
        self._conns.clear()
        self._unauthenticated = UnauthenticatedConnections()
        self._clients = ClientConnections()

    def _take_events(self) -> Iterator[LinkEvent]:
        while self._events:
            event = self._events.popleft()
            yield event
            if isinstance(event, ConnectionLost):
                self._clients.forget(event.conn)

    def _bounded(self, timeout: float | None) -> float | None:
        """Return how long to wait at most, so that :meth:`_check_deadlines` runs in time."""
        next_deadline = earliest(
            self._unauthenticated.deadline, self._clients.deadline, self._accept_at
        )
        if next_deadline is None:
            return timeout
        remaining = max(0.0, next_deadline - time.monotonic())
        return remaining if timeout is None else min(timeout, remaining)

    def _check_deadlines(self, now: float) -> None:
        for conn in self._unauthenticated.expired(now):
            self._counters.count("connections_timed_out")
            self._drop(conn)
        for conn in self._clients.idle(now):
            self._lose(conn, f"its engine sent no message for {IDLE_TIMEOUT:g} s")
        if self._accept_at is not None and now >= self._accept_at and self._listener is not None:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)

    def _handle(self, key: selectors.SelectorKey, ready: int) -> None:
        if isinstance(key.data, Connection):
            if key.data.id not in self._conns:
                return  # evicted by an earlier key of the same select()
            if ready & selectors.EVENT_WRITE:
                self._flush(key.data)
            if key.data.id in self._conns and ready & selectors.EVENT_READ:
                self._read(key.data)
        elif isinstance(key.data, socket.socket):
            self._accept(key.data)
        else:
            with contextlib.suppress(BlockingIOError):
                while self._wake_in.recv(4096):
                    pass

    # ---- accepted connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as exc:
            if exc.errno in NO_DESCRIPTORS:
                self._selector.unregister(listener)
                self._accept_at = time.monotonic() + ACCEPT_PAUSE
                self._counters.count("accepts_without_descriptor")
            return  # any other error: the client has closed the connection
        ip = plain_ip(str(address[0]))
        contexts = self._tls.contexts()
        if (evicted := self._unauthenticated.to_evict(ip)) is not None:
            self._counters.count("connections_evicted")
            self._drop(evicted)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(sock.close)
            try:
                reached = sock.getsockname()
                encrypted = TlsRecords(sock, contexts.server, server_side=True)
                conn = self._add(next(self._ids), encrypted, MAX_UNAUTHENTICATED_FRAME)
            except OSError:
                return  # the client has closed the connection
            on_failure.pop_all()
        conn.address = ip
        conn.server_connection = ServerConnection(
            Address(*reached[:2]), contexts.certificate, os.urandom(NONCE_BYTES)
        )
        conn.hello_by = time.monotonic() + self._timeout
        self._unauthenticated.add(conn)
        # held until TLS is complete
        self.send(conn.id, Challenge(PROTOCOL, conn.server_connection.nonce))
        self._read(conn)

    def _authenticate(
        self,
        conn: Connection,
        server: HandshakeServer,
        server_connection: ServerConnection,
        message: Message,
    ) -> None:
        """Check a client's first message."""
        answer = server.answer(message, server_connection)
        if isinstance(answer, Accepted):
            answer = self._clients.refusal(answer.hello.engine) or answer
        if isinstance(answer, Refusal):
            conn.closing = True
            self._counters.count("connections_refused")
            self.send(conn.id, answer)
            return
        conn.server_connection = None
        conn.hello_by = float("inf")
        conn.inbox.limit = MAX_FRAME
        self._unauthenticated.discard(conn)
        self._clients.add(
            conn, answer.hello, is_own_engine=answer.hello.engine == server.welcome.engine
        )
        self.send(conn.id, answer.proof)
        self.send(conn.id, answer.welcome)

    # ---- all connections

    def _add(self, id_: ConnId, tls: TlsRecords, limit: int) -> Connection:
        set_socket_options(tls.sock)
        conn = Connection(id_, tls, Deframer(limit))
        self._selector.register(tls.sock, selectors.EVENT_READ, conn)
        self._conns[id_] = conn
        return conn

    def _add_opened(self) -> None:
        for conn, future in self._opener.take_done():
            # not raised here: its traceback would hold this frame, and this frame the future, which
            # holds the failure; such a circle holds the whole rank until Python collects garbage
            failure = future.exception()
            if isinstance(failure, PeerError):
                has_ended = isinstance(failure, AnotherEngine | PortClosed)
                is_incompatible = isinstance(failure, IncompatiblePeer)
                cause = failure.cause if isinstance(failure, IncompatiblePeer) else ""
                self._events.append(
                    ConnectFailed(conn, str(failure), is_incompatible, has_ended, cause)
                )
                continue
            tls, welcome = future.result()
            try:
                self._unread[conn] = self._add(conn, tls, MAX_FRAME)
            except OSError as exc:  # the peer has closed the connection since
                tls.close()
                self._events.append(ConnectFailed(conn, str(exc)))
            else:
                self._events.append(PeerConnected(conn, welcome, _leads_elsewhere(tls.sock)))

    def _read(self, conn: Connection) -> None:
        """Handle the received records, and send TLS's own answers to them."""
        try:
            self._read_records(conn)
        except BlockingIOError:
            pass
        except OSError as exc:
            self._fail(conn, exc)
        except PeerError as exc:
            self._lose(conn, str(exc), silent=True)
        if conn.id not in self._conns:
            return
        if conn.tls.unsent_sealed > MAX_UNSENT:
            self._lose(conn, f"it left {conn.tls.unsent_sealed} bytes unread", silent=True)
        else:
            self._flush(conn)

    def _read_records(self, conn: Connection) -> None:
        for _ in range(MAX_READS):
            data = conn.tls.recv()
            if (
                conn.server_connection is not None
                and conn.tls.records > MAX_UNAUTHENTICATED_RECORDS
            ):
                self._counters.count("connections_over_record_limit")
                self._drop(conn)
                return
            for message in conn.inbox.feed(data):
                # our answer to the message before may have failed and closed it
                if conn.id in self._conns:
                    self._received(conn, decode(message))
            if conn.id not in self._conns:
                return
        self._unread[conn.id] = conn  # the other connections first

    def _fail(self, conn: Connection, exc: OSError) -> None:
        if conn.tls.is_shaking:
            self._counters.count("connections_without_tls")
        if isinstance(exc, ssl.SSLError):
            self._lose(conn, f"TLS: {exc.reason}", silent=True)
        else:
            self._lose(conn, str(exc), silent=exc.errno in SILENT, reset=exc.errno in RESET)

    def _received(self, conn: Connection, message: Message) -> None:
        if conn.server_connection is None:
            self._clients.note_message(conn)
            self._events.append(MessageReceived(conn.id, message))
        elif self._server is not None and not conn.closing:
            # a refused client stays unauthenticated
            self._authenticate(conn, self._server, conn.server_connection, message)

    def _flush(self, conn: Connection) -> None:
        try:
            while conn.tls.wants_write:
                conn.tls.send()
        except BlockingIOError:
            pass
        except OSError as exc:
            self._fail(conn, exc)
            return
        if conn.closing and not conn.tls.unsent:
            self._drop(conn)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if conn.tls.wants_write else 0)
        if self._selector.get_key(conn.tls.sock).events != events:
            self._selector.modify(conn.tls.sock, events, conn)

    def _lose(
        self, conn: Connection, reason: str, *, silent: bool = False, reset: bool = False
    ) -> None:
        if conn.server_connection is None:
            self._events.append(ConnectionLost(conn.id, reason, silent, reset))
        self._drop(conn)

    def _drop(self, conn: Connection) -> None:
        if self._conns.pop(conn.id, None) is not None:
            self._unauthenticated.discard(conn)
            self._clients.discard(conn)
            self._selector.unregister(conn.tls.sock)
            conn.tls.close()


def _leads_elsewhere(sock: socket.socket) -> bool:
    """Whether a connection leads to another machine, or may."""
    try:
        return is_elsewhere(str(sock.getpeername()[0]), str(sock.getsockname()[0]))
    except OSError:  # the peer has reset it already
        return True
