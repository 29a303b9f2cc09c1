"""The accepted connections of a listener, before and after authentication, and their limits."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdrelay_connector.core.ids import ConnId, EngineId
from pdrelay_connector.core.messages import Hello, Refusal
from pdrelay_connector.core.session.handshake import are_of_one_engine
from pdrelay_connector.io.connection import Connection

MAX_UNAUTHENTICATED = 512  # connections without a valid Hello; the next one evicts the oldest
MAX_UNAUTHENTICATED_PER_ADDRESS = 128  # the same for one IP address
MAX_CLIENTS = 8192  # authenticated connections
# the same for one engine: its scheduler and 1,024 ranks; reconnects overlap for a moment
MAX_CLIENTS_PER_ENGINE = 1100
# s without a message before an engine's connections are closed. The engine then counts us as gone,
# so this exceeds the 18 minutes in which our writes may still reach its memory
# (core/push/lost_peer.py).
IDLE_TIMEOUT = 3600.0


class UnauthenticatedConnections:
    """Connections without a valid Hello, oldest first."""

    def __init__(self) -> None:
        self._conns: dict[ConnId, Connection] = {}

    @property
    def deadline(self) -> float | None:
        """When the oldest connection times out; None without connections."""
        return next((conn.hello_by for conn in self._conns.values()), None)

    def expired(self, now: float) -> Sequence[Connection]:
        """Return the connections whose Hello is overdue."""
        return list(itertools.takewhile(lambda conn: now >= conn.hello_by, self._conns.values()))

    def to_evict(self, ip: str) -> Connection | None:
        """Return the connection to close before one from ``ip`` is accepted; None: there is room.

        It is the oldest of ``ip`` if that address is at its limit, else the oldest of the address
        with the most connections: a flood from one address then cannot keep out an engine at
        another.
        """
        counts = Counter(conn.address for conn in self._conns.values())
        if counts[ip] >= MAX_UNAUTHENTICATED_PER_ADDRESS:
            crowded = ip
        elif len(self._conns) >= MAX_UNAUTHENTICATED:
            crowded = counts.most_common(1)[0][0]
        else:
            return None
        return next(conn for conn in self._conns.values() if conn.address == crowded)

    def add(self, conn: Connection) -> None:
        """Count an accepted connection."""
        self._conns[conn.id] = conn

    def discard(self, conn: Connection) -> None:
        """Stop counting a connection; others are ignored."""
        self._conns.pop(conn.id, None)


@dataclass(slots=True)
class _EngineConnections:
    """The authenticated connections from one engine."""

    conns: dict[ConnId, Connection] = field(default_factory=dict[ConnId, Connection])
    heard_at: float = 0.0  # when the last message arrived


class ClientConnections:
    """Connections with a valid Hello."""

    def __init__(self) -> None:
        self._open: set[ConnId] = set()
        # other engines only, the least recently heard first
        self._engines: dict[EngineId, _EngineConnections] = {}
        self._hellos: dict[ConnId, Hello] = {}  # until ConnectionLost has been handled

    @property
    def deadline(self) -> float | None:
        """When the engine with the oldest message will have been idle for too long; None: none."""
        return next((engine.heard_at + IDLE_TIMEOUT for engine in self._engines.values()), None)

    def idle(self, now: float) -> Sequence[Connection]:
        """Return the connections of engines that have been idle for too long."""
        idle = itertools.takewhile(
            lambda engine: now >= engine.heard_at + IDLE_TIMEOUT, self._engines.values()
        )
        return [conn for engine in idle for conn in engine.conns.values()]

    def refusal(self, engine: EngineId) -> Refusal | None:
        """Return a refusal if one more connection of ``engine`` would exceed a limit."""
        of_engine = len(self._engines[engine].conns) if engine in self._engines else 0
        if len(self._open) < MAX_CLIENTS and of_engine < MAX_CLIENTS_PER_ENGINE:
            return None
        return Refusal(f"{len(self._open)} connections are open here, {of_engine} of them yours")

    def add(self, conn: Connection, hello: Hello, *, is_own_engine: bool) -> None:
        """Count an authenticated connection.

        Our own workers may be idle for ever, so their engine is not tracked.
        """
        conn.hello = self._hellos[conn.id] = hello
        self._open.add(conn.id)
        if not is_own_engine:
            self._engines.setdefault(hello.engine, _EngineConnections()).conns[conn.id] = conn
            self.note_message(conn)

    def note_message(self, conn: Connection) -> None:
        """Note that a message has arrived."""
        if (
            conn.hello is not None
            and (engine := self._engines.pop(conn.hello.engine, None)) is not None
        ):
            self._engines[conn.hello.engine] = engine
            engine.heard_at = time.monotonic()

    def discard(self, conn: Connection) -> None:
        """Stop counting a closed connection. Its Hello stays until :meth:`forget`."""
        self._open.discard(conn.id)
        if conn.hello is not None and (engine := self._engines.get(conn.hello.engine)) is not None:
            del engine.conns[conn.id]
            if not engine.conns:
                del self._engines[conn.hello.engine]

    def forget(self, conn: ConnId) -> None:
        """Forget the Hello of a closed connection."""
        self._hellos.pop(conn, None)

    def engine_of(self, conn: ConnId) -> EngineId | None:
        """Return the engine that opened a connection, until :meth:`forget`."""
        hello = self._hellos.get(conn)
        return None if hello is None else hello.engine

    def are_of_one_engine(self, first: ConnId, second: ConnId) -> bool:
        """Whether processes of one engine opened these two connections, as their Hellos prove."""
        ours = self._hellos.get(first)
        theirs = self._hellos.get(second)
        if first == second or ours is None or theirs is None:
            return first == second
        return are_of_one_engine(ours, theirs)
