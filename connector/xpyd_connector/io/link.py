"""Control connections over TCP: one selector, owned by one thread, that never blocks on a peer."""

import contextlib
import errno
import itertools
import os
import queue
import selectors
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from xpyd_connector.core.addresses import plain_ip
from xpyd_connector.core.counters import Counters
from xpyd_connector.core.ids import Address, ConnId, EngineId
from xpyd_connector.core.messages import (
    MAX_FRAME,
    MAX_UNAUTHENTICATED_FRAME,
    PROTOCOL,
    Challenge,
    Hello,
    Message,
    Refusal,
    Welcome,
    decode,
    encode,
)
from xpyd_connector.core.ports import ConnectFailed, ConnectionLost, LinkEvent, MessageReceived, PeerConnected
from xpyd_connector.core.session.handshake import (
    NONCE_BYTES,
    Accepted,
    HandshakeClient,
    HandshakeServer,
    ServerConnection,
    are_of_one_engine,
)
from xpyd_connector.errors import PeerError, SettingsError
from xpyd_connector.io.connect import open_connection
from xpyd_connector.io.framing import Deframer, frame
from xpyd_connector.io.tls import Tls
from xpyd_connector.io.tls_records import MAX_UNAUTHENTICATED_RECORDS, TlsRecords

MAX_UNSENT = 16 << 20  # bytes a peer may leave unread before we close its connection
MAX_UNAUTHENTICATED = 512  # connections that have not said a valid Hello; one more, and the oldest of them goes
MAX_UNAUTHENTICATED_PER_ADDRESS = 128  # the same for one IP address
MAX_CLIENTS = 8192  # connections of others that have said one
MAX_CLIENTS_PER_ENGINE = 1100  # the same for one engine: its scheduler and 1,024 ranks, some of them twice for a moment
IDLE_TIMEOUT = 3600.0  # s without a word of an engine after which its connections are closed; longer than the 18
# minutes in which what we have written may still arrive there (core/push/decode_scheduler.py): to it, we are gone then
MAX_READS = 64  # TLS records of one connection before it is others' turn: 1 MiB, or 2 ms of key updates
ACCEPT_PAUSE = 1.0  # s without accepting when the system has no more descriptors: trying would burn this thread's core
USER_TIMEOUT_MS = 20_000  # a peer that acknowledges nothing for so long is gone (cut network, lost machine)
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # s, s, probes: the same, on an idle connection
# What the system says of a peer that says nothing: it may well be alive behind a network that is cut.
SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ConnectResult = tuple[TlsRecords, Welcome]


@dataclass(slots=True)
class _Connection:
    """One connection. One that we accepted is unauthenticated until its valid Hello."""

    id: ConnId
    tls: TlsRecords
    inbox: Deframer
    server_connection: ServerConnection | None = None  # what the client's Hello must prove; absent once authenticated
    address: str = ""  # IP address of an accepted connection
    greet_by: float = float("inf")  # when it is closed if still unauthenticated
    hello: Hello | None = None  # of an authenticated client
    closing: bool = False  # close once everything is sent


@dataclass(slots=True)
class _EngineConnections:
    """The authenticated connections from one engine."""

    conns: dict[ConnId, _Connection] = field(default_factory=dict[ConnId, _Connection])
    heard_at: float = 0.0  # when one of them last said something


class SocketLink:
    """Implements :class:`~xpyd_connector.core.ports.Link`. All but :meth:`wake` belong to the owning thread."""

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
        self._client = client
        self._tls = tls
        self._counters = counters
        self._timeout = timeout
        self._local_only = local_only
        self._pool = ThreadPoolExecutor(threads, "xpyd-handshake")
        self._server: HandshakeServer | None = None  # absent on an engine that lends nothing
        self._listener: socket.socket | None = None  # likewise
        self._accept_at: float | None = None  # when to accept again; absent while we do
        self._ids = map(ConnId, itertools.count(1))
        self._conns: dict[ConnId, _Connection] = {}
        self._unauthenticated: dict[ConnId, _Connection] = {}  # those of _conns, oldest first
        self._engines: dict[EngineId, _EngineConnections] = {}  # of clients, the least recently heard first
        self._hellos: dict[ConnId, Hello] = {}  # of clients, until ConnectionLost has been handled
        self._more: dict[ConnId, _Connection] = {}  # we may have taken more of theirs from the socket than we have read
        self._connecting: set[ConnId] = set()
        self._connected: queue.SimpleQueue[tuple[ConnId, Future[_ConnectResult]]] = queue.SimpleQueue()
        self._events: deque[LinkEvent] = deque()
        self._is_stopped = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.settimeout(0)
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    def listen(self, address: Address, server: HandshakeServer) -> Address:
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
        self._server, self._listener = server, listener
        self._selector.register(listener, selectors.EVENT_READ, listener)
        return Address(*listener.getsockname()[:2])

    def connect(self, peer: Address, engine: EngineId) -> ConnId:
        """Start connecting on a pool thread."""
        conn = next(self._ids)
        self._connecting.add(conn)
        future = self._pool.submit(
            open_connection, peer, engine, self._client, self._tls, timeout=self._timeout, local_only=self._local_only
        )
        future.add_done_callback(lambda done: self._report(conn, done))
        return conn

    def _report(self, conn: ConnId, done: Future[_ConnectResult]) -> None:
        """On the pool thread: a meeting ended."""
        self._connected.put((conn, done))
        self.wake()
        if self._is_stopped:  # poll() is not called any more
            self._take_connected()

    def send(self, conn: ConnId, message: Message) -> None:
        """Queue a message and send what the socket takes now."""
        if (found := self._conns.get(conn)) is None:
            return  # its Lost is on the way, or has been told
        if found.tls.unsent > MAX_UNSENT:  # before this message: a Welcome alone may be larger
            self._lose(found, f"it left {found.tls.unsent} bytes unread", silent=True)
            return
        found.tls.write(frame(encode(message)))
        self._flush(found)

    def close(self, conn: ConnId) -> None:
        """Close a connection, or give up opening it."""
        self._connecting.discard(conn)
        self._hellos.pop(conn, None)
        if (found := self._conns.get(conn)) is not None:
            self._drop(found)
        self._events = deque(event for event in self._events if event.conn != conn)

    def are_of_one_engine(self, one: ConnId, other: ConnId) -> bool:
        """Whether processes of one engine opened these two connections, as their Hellos prove.

        A closed connection counts until its :class:`ConnectionLost` has been handled, for its last messages.
        """
        ours, theirs = self._hellos.get(one), self._hellos.get(other)
        if one == other or ours is None or theirs is None:
            return one == other
        return are_of_one_engine(ours, theirs)

    def wake(self) -> None:
        """Make a running or coming :meth:`poll` return at once. Any thread may call it."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: not polled any more
            self._wake_out.send(b"\0")

    def poll(self, timeout: float | None) -> Iterator[LinkEvent]:
        """Wait at most ``timeout`` seconds (None: for ever) for something to happen, and return what did.

        A connection that is closed while the events are taken in has none after that.
        """
        for key, ready in self._selector.select(0 if self._events or self._more else self._bounded(timeout)):
            self._handle(key, ready)
        more, self._more = self._more, {}
        for conn in more.values():
            if conn.id in self._conns:
                self._read(conn)
        self._take_connected()
        self._look_at_clock(time.monotonic())
        return self._take_events()

    def stop(self) -> None:
        """Close every socket and the pool. A meeting under way ends by itself, within its time."""
        self._connecting.clear()  # before the flag: from then on a pool thread closes what it has opened
        self._is_stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wake_out.close()
        self._selector.close()
        self._conns.clear()
        self._unauthenticated.clear()
        self._engines.clear()
        self._take_connected()

    def _take_events(self) -> Iterator[LinkEvent]:
        while self._events:
            event = self._events.popleft()
            yield event
            if isinstance(event, ConnectionLost):
                self._hellos.pop(event.conn, None)

    def _bounded(self, timeout: float | None) -> float | None:
        """Return how long to wait at most, so that :meth:`_look_at_clock` is in time."""
        dues = [conn.greet_by for conn in itertools.islice(self._unauthenticated.values(), 1)]
        dues += [engine.heard_at + IDLE_TIMEOUT for engine in itertools.islice(self._engines.values(), 1)]
        dues += [] if self._accept_at is None else [self._accept_at]
        if not dues:
            return timeout
        left = max(0.0, min(dues) - time.monotonic())
        return left if timeout is None else min(timeout, left)

    def _look_at_clock(self, now: float) -> None:
        while self._unauthenticated and now >= (oldest := next(iter(self._unauthenticated.values()))).greet_by:
            self._counters.count("connections_timed_out")
            self._drop(oldest)
        while self._engines and now >= (quietest := next(iter(self._engines.values()))).heard_at + IDLE_TIMEOUT:
            for conn in list(quietest.conns.values()):
                self._lose(conn, f"its engine said nothing for {IDLE_TIMEOUT:g} s")
        if self._accept_at is not None and now >= self._accept_at and self._listener is not None:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)

    def _handle(self, key: selectors.SelectorKey, ready: int) -> None:
        if isinstance(key.data, _Connection):
            if key.data.id not in self._conns:
                return  # dropped since the selector looked, to make room for another
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

    # ---- strangers

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as exc:
            if exc.errno in NO_ROOM:
                self._selector.unregister(listener)
                self._accept_at = time.monotonic() + ACCEPT_PAUSE
                self._counters.count("accepts_without_descriptor")
            return  # else the caller went away before we looked
        ip, contexts = plain_ip(str(address[0])), self._tls.contexts()
        self._make_room(ip)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(sock.close)
            try:
                reached = sock.getsockname()
                encrypted = TlsRecords(sock, contexts.server, server_side=True)
                conn = self._adopt(next(self._ids), encrypted, MAX_UNAUTHENTICATED_FRAME)
            except OSError:
                return  # the caller went away
            on_failure.pop_all()
        conn.address = ip
        conn.server_connection = ServerConnection(Address(*reached[:2]), contexts.certificate, os.urandom(NONCE_BYTES))
        conn.greet_by = time.monotonic() + self._timeout
        self._unauthenticated[conn.id] = conn
        self.send(conn.id, Challenge(PROTOCOL, conn.server_connection.nonce))  # it leaves when TLS is complete
        self._read(conn)

    def _make_room(self, ip: str) -> None:
        """Send a stranger away if there are too many: of this address, or else of the one that has the most.

        The oldest goes, so that who floods us from one address does not keep out an engine at another.
        """
        counts = Counter(conn.address for conn in self._unauthenticated.values())
        if counts[ip] >= MAX_UNAUTHENTICATED_PER_ADDRESS:
            crowded = ip
        elif len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            crowded = counts.most_common(1)[0][0]
        else:
            return
        self._counters.count("connections_evicted")
        self._drop(next(conn for conn in self._unauthenticated.values() if conn.address == crowded))

    def _authenticate(
        self, conn: _Connection, server: HandshakeServer, server_connection: ServerConnection, message: Message
    ) -> None:
        """Check a client's first message."""
        answer = server.answer(message, server_connection)
        if isinstance(answer, Accepted):
            answer = self._crowded(answer.hello.engine) or answer
        if isinstance(answer, Refusal):
            conn.closing = True
            self._counters.count("connections_refused")
            self.send(conn.id, answer)
            return
        conn.server_connection, conn.greet_by, conn.inbox.limit, conn.hello = (
            None,
            float("inf"),
            MAX_FRAME,
            answer.hello,
        )
        del self._unauthenticated[conn.id]
        self._hellos[conn.id] = answer.hello
        if answer.hello.engine != server.welcome.engine:  # our own workers may be quiet
            self._engines.setdefault(answer.hello.engine, _EngineConnections()).conns[conn.id] = conn
            self._heard(answer.hello.engine)
        self.send(conn.id, answer.proof)
        self.send(conn.id, answer.welcome)

    def _crowded(self, engine: EngineId) -> Refusal | None:
        of_engine = len(self._engines[engine].conns) if engine in self._engines else 0
        greeted = sum(conn.hello is not None for conn in self._conns.values())
        if greeted < MAX_CLIENTS and of_engine < MAX_CLIENTS_PER_ENGINE:
            return None
        return Refusal(f"{greeted} connections are open here, {of_engine} of them yours")

    def _heard(self, engine: EngineId) -> None:
        """Note that an engine has said something."""
        if (found := self._engines.pop(engine, None)) is not None:
            self._engines[engine] = found
            found.heard_at = time.monotonic()

    # ---- connections

    def _adopt(self, id_: ConnId, tls: TlsRecords, limit: int) -> _Connection:
        sock = tls.sock
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {"TCP_USER_TIMEOUT": USER_TIMEOUT_MS, **KEEPALIVE}.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        conn = _Connection(id_, tls, Deframer(limit))
        self._selector.register(sock, selectors.EVENT_READ, conn)
        self._conns[id_] = conn
        return conn

    def _take_connected(self) -> None:
        while (ended := self._next_connected()) is not None:
            conn, future = ended
            if conn not in self._connecting:
                if not future.cancelled() and future.exception() is None:
                    future.result()[0].close()  # it was closed meanwhile
                continue
            self._connecting.discard(conn)
            try:
                tls, welcome = future.result()
            except PeerError as exc:
                self._events.append(ConnectFailed(conn, str(exc)))
                continue
            try:
                self._more[conn] = self._adopt(conn, tls, MAX_FRAME)
            except OSError as exc:  # it has closed the connection since
                tls.close()
                self._events.append(ConnectFailed(conn, str(exc)))
            else:
                self._events.append(PeerConnected(conn, welcome))

    def _next_connected(self) -> tuple[ConnId, Future[_ConnectResult]] | None:
        try:
            return self._connected.get_nowait()
        except queue.Empty:
            return None

    def _read(self, conn: _Connection) -> None:
        """Take in what has come, and send what TLS itself answers."""
        try:
            self._take_in(conn)
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

    def _take_in(self, conn: _Connection) -> None:
        for _ in range(MAX_READS):
            data = conn.tls.recv()
            if conn.server_connection is not None and conn.tls.records > MAX_UNAUTHENTICATED_RECORDS:
                self._counters.count("connections_over_record_limit")
                self._drop(conn)
                return
            for message in conn.inbox.feed(data):
                if conn.id in self._conns:  # the answer to the message before may have found the peer gone
                    self._received(conn, decode(message))
            if conn.id not in self._conns:
                return
        self._more[conn.id] = conn  # others first

    def _fail(self, conn: _Connection, exc: OSError) -> None:
        if conn.tls.is_shaking:
            self._counters.count("connections_without_tls")
        if isinstance(exc, ssl.SSLError):
            self._lose(conn, f"TLS: {exc.reason}", silent=True)
        else:
            self._lose(conn, str(exc), silent=exc.errno in SILENT)

    def _received(self, conn: _Connection, message: Message) -> None:
        if conn.server_connection is None:
            if conn.hello is not None:
                self._heard(conn.hello.engine)
            self._events.append(MessageReceived(conn.id, message))
        elif self._server is not None and not conn.closing:  # a refused client stays unauthenticated
            self._authenticate(conn, self._server, conn.server_connection, message)

    def _flush(self, conn: _Connection) -> None:
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
        self._watch(conn)

    def _watch(self, conn: _Connection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if conn.tls.wants_write else 0)
        if self._selector.get_key(conn.tls.sock).events != wanted:
            self._selector.modify(conn.tls.sock, wanted, conn)

    def _lose(self, conn: _Connection, reason: str, *, silent: bool = False) -> None:
        if conn.server_connection is None:
            self._events.append(ConnectionLost(conn.id, reason, silent))
        self._drop(conn)

    def _drop(self, conn: _Connection) -> None:
        if self._conns.pop(conn.id, None) is not None:
            self._unauthenticated.pop(conn.id, None)
            if conn.hello is not None and (engine := self._engines.get(conn.hello.engine)) is not None:
                del engine.conns[conn.id]
                if not engine.conns:
                    del self._engines[conn.hello.engine]
            self._selector.unregister(conn.tls.sock)
            conn.tls.close()
