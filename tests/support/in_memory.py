"""Several engines in one process: what tests use instead of sockets and NIXL.

A :class:`InMemoryNetwork` carries everything in turns, so that a test decides what arrives, late,
twice or never. Faults are plain methods: :meth:`Network.cut`, :meth:`Network.kill`,
:meth:`Network.lose`, and for single messages :meth:`Network.drop`, :meth:`Network.repeat`,
:meth:`Network.delay`. Connections inside one engine have none.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdrelay_connector.core.ids import Address, ConnId, EngineId, XferId
from pdrelay_connector.core.layout.transfer_plan import Spans
from pdrelay_connector.core.messages import Message, RankInfo, Welcome, decode, encode
from pdrelay_connector.core.ports import (
    ConnectFailed,
    ConnectionLost,
    LinkEvent,
    MessageReceived,
    PeerConnected,
    XferEnded,
    XferOutcome,
)
from pdrelay_connector.errors import BackendError, TransferError

BLOCK_BYTES = 64  # of a memory's every piece; its address is its number times this


@dataclass(slots=True)
class _Wire:
    """One connection: the links at both ends and the id it has there."""

    links: frozenset[int]
    is_local: bool  # inside one engine: no network that could fail
    # link number -> its id of this connection; those that have not closed it
    ends: dict[int, ConnId]
    # None: closed
    queue: list[tuple[int, bytes | None]] = field(default_factory=list[tuple[int, bytes | None]])


class InMemoryNetwork:
    """Carries messages and blocks between the links and movers that joined it."""

    def __init__(self) -> None:
        self.links: list[InMemoryLink] = []
        self.memories: dict[str, list[bytes]] = {}
        self._listeners: dict[Address, tuple[InMemoryLink, Welcome]] = {}
        self._refusals: dict[Address, str] = {}
        self._wires: list[_Wire] = []
        self._calls: list[tuple[InMemoryLink, ConnId, Address]] = []
        self._conns = map(ConnId, itertools.count(1))
        self._cut: set[int] = set()
        # whose own NIXL serves nobody, while the side channel of its engine works
        self.unreachable: set[str] = set()
        self.aliases: dict[str, str] = {}  # memory -> that of the engine it is a part of
        self._callers: dict[tuple[int, ConnId], str] = {}

    def listen(self, address: Address, link: "InMemoryLink", welcome: Welcome) -> None:
        """Answer those who call an address; a restarted engine replaces the one before it."""
        self._listeners[address] = link, welcome
        self._refusals.pop(address, None)

    def refuse(self, link: "InMemoryLink", reason: str) -> None:
        """Close all connections of a link, and refuse others until it listens again."""
        self._hang_up_all(link)
        self._refusals.update({address: reason for address, entry in self._listeners.items() if entry[0] is link})

    def call(self, link: "InMemoryLink", address: Address) -> ConnId:
        """Note that a link wants to meet an address."""
        conn = next(self._conns)
        self._calls.append((link, conn, address))
        return conn

    def post(self, link: "InMemoryLink", conn: ConnId, message: Message) -> None:
        """Put a message on its way; it is encoded and decoded as on a real wire."""
        for wire in self._wires_of(link, conn):
            (receiver,) = wire.links - {link.number}
            wire.queue.append((receiver, encode(message)))

    def caller(self, link: "InMemoryLink", conn: ConnId) -> str | None:
        """Return the memory of the engine that opened a connection, in place of a handshake."""
        memory = self._callers.get((link.number, conn), "")
        return self.aliases.get(memory, memory) or None

    def hang_up(self, link: "InMemoryLink", conn: ConnId) -> None:
        """Close one connection; the other end sees that after all earlier messages."""
        self._calls = [call for call in self._calls if call[1] != conn]
        for wire in self._wires_of(link, conn):
            del wire.ends[link.number]
            wire.queue += [(number, None) for number in wire.ends]

    def kill(self, link: "InMemoryLink") -> None:
        """End a process: its connections close, its address does not answer, its memory is gone."""
        self._hang_up_all(link)
        self._listeners = {a: entry for a, entry in self._listeners.items() if entry[0] is not link}
        self.memories.pop(link.memory, None)

    def _hang_up_all(self, link: "InMemoryLink") -> None:
        for wire in self._wires:
            if link.number in wire.ends:
                self.hang_up(link, wire.ends[link.number])
        self._calls = [call for call in self._calls if call[0] is not link]

    def cut(self, link: "InMemoryLink", *, is_cut: bool) -> None:
        """Cut an engine off, or mend it: nothing arrives, and no end notices."""
        (self._cut.add if is_cut else self._cut.discard)(link.number)

    def lose(self) -> None:
        """Break every open connection, as a network does that resets."""
        between = [wire for wire in self._wires if not wire.is_local]
        self._break(between, ConnectionLost(ConnId(0), "connection reset", silent=True, reset=True))

    def lose_scheduler(self, link: "InMemoryLink") -> None:
        """Break the connection between a worker's link and its own scheduler; both live."""
        own = [wire for wire in self._wires if wire.is_local and link.number in wire.links]
        self._break(own, ConnectionLost(ConnId(0), "connection reset"))

    def time_out(self) -> None:
        """End all cut connections, as TCP does in time; neither end knows if the other lives."""
        cut = [wire for wire in self._wires if self._cut & wire.links and not wire.is_local]
        self._break(cut, ConnectionLost(ConnId(0), "connection timed out", silent=True))

    def _break(self, wires: Sequence[_Wire], news: ConnectionLost) -> None:
        self._wires = [wire for wire in self._wires if wire not in wires]
        for wire in wires:
            for number, id_ in wire.ends.items():
                self.links[number].inbox.append(news._replace(conn=id_))

    def in_flight(self) -> int:
        """Return how many messages are on their way."""
        return len(self._messages())

    def peek(self, number: int) -> Message:
        """Return one of the messages in flight."""
        wire, place = self._messages()[number]
        return decode(wire.queue[place][1] or b"")

    def drop(self, number: int) -> None:
        """Lose one of the messages in flight."""
        wire, place = self._messages()[number]
        del wire.queue[place]

    def repeat(self, number: int) -> None:
        """Deliver one of the messages in flight twice."""
        wire, place = self._messages()[number]
        wire.queue.insert(place, wire.queue[place])

    def delay(self, number: int) -> None:
        """Let one of the messages in flight be overtaken by all others on its connection."""
        wire, place = self._messages()[number]
        wire.queue.append(wire.queue.pop(place))

    def deliver(self) -> None:
        """Carry everything that can travel now."""
        calls = self._calls
        self._calls = []
        for link, conn, address in calls:
            self._connect(link, conn, address)
        for wire in self._wires:
            if wire.is_local or not self._cut & wire.links:
                self._drain(wire)
        self._wires = [wire for wire in self._wires if wire.ends]

    def reachable(self, memory: str) -> bool:
        """Whether the memory of an engine can be read now."""
        return memory in self.memories and not self.is_cut(memory)

    def is_cut(self, memory: str) -> bool:
        """Whether an engine, which may have died, is cut off."""
        return any(link.number in self._cut for link in self.links if link.memory == memory)

    def _connect(self, link: "InMemoryLink", conn: ConnId, address: Address) -> None:
        host, welcome = self._listeners.get(address, (None, None))
        is_local = host is not None and host.engine == link.engine
        if link.number in self._cut and not is_local:
            self._calls.append((link, conn, address))
            return
        if host is None or welcome is None or (host.number in self._cut and not is_local):
            link.inbox.append(ConnectFailed(conn, f"cannot connect to {address}", has_ended=host is None))
            return
        if (reason := self._refusals.get(address)) is not None:
            link.inbox.append(ConnectFailed(conn, f"{address} refused: {reason}", is_incompatible=True))
            return
        ends = {link.number: conn, host.number: next(self._conns)}
        self._wires.append(_Wire(frozenset(ends), is_local, ends))
        self._callers[host.number, ends[host.number]] = link.memory
        link.inbox.append(PeerConnected(conn, welcome, is_elsewhere=not is_local))

    def _drain(self, wire: _Wire) -> None:
        queue = wire.queue
        wire.queue = []
        for receiver, data in queue:
            if receiver not in wire.ends:
                continue  # it has closed the connection meanwhile
            if data is not None:
                self.links[receiver].inbox.append(MessageReceived(wire.ends[receiver], decode(data)))
            else:
                self.links[receiver].inbox.append(ConnectionLost(wire.ends.pop(receiver), "it closed the connection"))

    def _messages(self) -> list[tuple[_Wire, int]]:
        wires = [wire for wire in self._wires if not wire.is_local]
        return [(wire, i) for wire in wires for i, (_, data) in enumerate(wire.queue) if data is not None]

    def _wires_of(self, link: "InMemoryLink", conn: ConnId) -> list[_Wire]:
        return [wire for wire in self._wires if wire.ends.get(link.number) == conn]


class InMemoryLink:
    """Implements :class:`~pdrelay_connector.core.ports.Link` on a :class:`InMemoryNetwork`."""

    def __init__(self, network: InMemoryNetwork, memory: str, *, engine: str = "") -> None:
        self.network = network
        self.memory = memory  # whose death closes this link
        # between links of the same one no network can fail
        self.engine = engine or f"{memory} {len(network.links)}"
        self.number = len(network.links)
        self.inbox: list[LinkEvent] = []
        network.links.append(self)

    def connect(self, peer: Address, engine: EngineId) -> ConnId:
        """Start connecting."""
        return self.network.call(self, peer)

    def are_of_one_engine(self, first: ConnId, second: ConnId) -> bool:
        """Whether the links at the other ends belong, or belonged, to one engine."""
        whose = self.network.caller(self, first)
        return first == second or (whose is not None and whose == self.network.caller(self, second))

    def engine_of(self, conn: ConnId) -> EngineId | None:
        """Return the engine that opened a connection: its memory has its name."""
        whose = self.network.caller(self, conn)
        return None if whose is None else EngineId(whose)

    def send(self, conn: ConnId, message: Message) -> None:
        """Send a message."""
        self.network.post(self, conn, message)

    def close(self, conn: ConnId) -> None:
        """Close a connection."""
        self.network.hang_up(self, conn)
        self.inbox = [event for event in self.inbox if event.conn != conn]

    def close_all(self, reason: str) -> None:
        """Close every connection, and refuse others."""
        self.network.refuse(self, reason)
        self.inbox = []

    def poll(self) -> Iterator[LinkEvent]:
        """Return what happened since the last call."""
        while self.inbox:
            yield self.inbox.pop(0)


@dataclass(slots=True)
class _InMemoryXfer:
    memory: str
    spans: Spans
    writes: bool
    cancelled: bool = False
    landing: bool = False  # its bytes can no longer be stopped


class InMemoryTransferAgent:
    """A :class:`~pdrelay_connector.core.ports.TransferAgent` that copies in ``poll``."""

    def __init__(self, network: InMemoryNetwork, memory: str) -> None:
        self._network = network
        self._memory = memory
        self._peers: set[str] = set()
        self._numbers = map(XferId, itertools.count(1))
        self._xfers: dict[XferId, _InMemoryXfer] = {}
        self.stuck = False  # transfers neither end nor move, like a peer that is stopped
        # NIXL cannot let go of cancelled transfers: they end later, and their bytes still land
        self.clinging = False
        self.broken = False  # its backend: nothing of it works any more
        self._lost: set[str] = set()  # peers whose connection is broken

    def lose(self, memory: str) -> None:
        """Break the connection to a peer; it stays broken until the peer is attached again."""
        self._lost.add(memory)

    def _is_broken(self, memory: str) -> bool:
        return self.broken or memory in self._lost or memory in self._network.unreachable

    def attach(self, peer: RankInfo) -> str:
        """Make a peer's memory reachable."""
        if (name := peer.agent.decode()) not in self._network.memories:
            raise TransferError(f"no memory of {name}")
        if self.broken:
            raise BackendError("the backend is broken")
        self._lost.discard(name)
        self._peers.add(name)
        return name

    def detach(self, handle: str) -> None:
        """Forget a peer; its transfers fail."""
        self._peers.discard(handle)

    def read(self, handle: str, spans: Spans) -> XferId:
        """Start copying theirs into ours."""
        return self._post(_InMemoryXfer(handle, spans, writes=False))

    def write(self, handle: str, spans: Spans) -> XferId:
        """Start copying ours into theirs."""
        return self._post(_InMemoryXfer(handle, spans, writes=True))

    def _post(self, flight: _InMemoryXfer) -> XferId:
        if self._is_broken(flight.memory):
            raise BackendError("the connection is broken")
        number = next(self._numbers)
        self._xfers[number] = flight
        return number

    def cancel(self, xfer: XferId) -> None:
        """Give a transfer up."""
        if xfer in self._xfers:
            self._xfers[xfer].cancelled = True

    def poll(self) -> Sequence[XferEnded]:
        """Move what can move, and report what ended."""
        ended: list[XferEnded] = []
        for number, flight in list(self._xfers.items()):
            is_gone = (flight.memory not in self._network.memories or flight.memory not in self._peers) or (
                self._is_broken(flight.memory) and not self.stuck
            )
            if flight.cancelled and self.clinging:
                flight.landing = True
            elif flight.cancelled or is_gone:
                if flight.landing and flight.memory in self._network.memories:
                    self._copy(flight)
                ended.append(
                    XferEnded(
                        number,
                        XferOutcome.FAILED,
                        0,
                        0,
                        0.0,
                        "cancelled" if flight.cancelled else "peer gone",
                    )
                )
            elif self._network.reachable(flight.memory) and not self.stuck:
                self._copy(flight)
                size = int(flight.spans[:, 2].sum())
                ended.append(XferEnded(number, XferOutcome.DONE, size, len(flight.spans), 0.001, ""))
        for end in ended:
            del self._xfers[end.xfer]
        return ended

    def _copy(self, flight: _InMemoryXfer) -> None:
        theirs = self._network.memories[flight.memory]
        ours = self._network.memories[self._memory]
        for remote, local in pieces_of(flight.spans):
            if flight.writes:
                theirs[remote] = ours[local]
            else:
                ours[local] = theirs[remote]


def pieces_of(spans: Spans) -> Iterator[tuple[int, int]]:
    """Return the numbers of the pieces that a transfer copies: there, and here."""
    for remote, local, size in spans.tolist():
        if remote % BLOCK_BYTES or local % BLOCK_BYTES or size % BLOCK_BYTES:
            raise TransferError(f"{size} bytes from {remote} to {local}: this memory has pieces of {BLOCK_BYTES} bytes")
        for offset in range(0, size, BLOCK_BYTES):
            yield (remote + offset) // BLOCK_BYTES, (local + offset) // BLOCK_BYTES
