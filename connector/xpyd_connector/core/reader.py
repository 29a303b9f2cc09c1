"""The decode worker's half: read the blocks, and hand them over only if the lease held until the read ended.

A load waits for its peer, reads, asks P whether the read counts, and ends. Its deadline
runs from the first moment; when it passes, the load fails at once, but its blocks must not
be used before NIXL has let go of them: a hung peer may write into them much later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from xpyd_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId, TransferId
from xpyd_connector.core.lives import follow
from xpyd_connector.core.messages import Done, Drop, Fenced, RankInfo
from xpyd_connector.core.peers import Peer, PeerBook, PeerState
from xpyd_connector.core.plan import check_regions, describe
from xpyd_connector.core.ports import Ended, Link, LinkEvent, Lost, Mover, Outcome, Received
from xpyd_connector.core.tally import Sample, Tally
from xpyd_connector.errors import ConnectorError, IllegalTransition

POLL_INTERVAL = 0.0004  # s between looks at NIXL while something is read
LINGER_INTERVAL = 0.02  # s between looks while only reads that were given up are in flight: a hung peer may take long


class LoadState(Enum):
    """Where a load is in its life."""

    WAITING = auto()  # for the peer to be met
    READING = auto()
    GIVING_UP = auto()  # failed and told so; NIXL may still write into our blocks
    CONFIRMING = auto()  # read; P has been asked whether the lease held
    OVER = auto()


class LoadEvent(Enum):
    """What can happen to a load."""

    STARTED = auto()
    READ = auto()
    CONFIRMED = auto()
    CANCELLED = auto()
    LET_GO = auto()
    FAILED = auto()


TRANSITIONS: Final[Mapping[LoadState, Mapping[LoadEvent, LoadState]]] = {
    LoadState.WAITING: {LoadEvent.STARTED: LoadState.READING, LoadEvent.FAILED: LoadState.OVER},
    LoadState.READING: {
        LoadEvent.READ: LoadState.CONFIRMING,
        LoadEvent.CANCELLED: LoadState.GIVING_UP,
        LoadEvent.FAILED: LoadState.OVER,
    },
    LoadState.GIVING_UP: {LoadEvent.LET_GO: LoadState.OVER},
    LoadState.CONFIRMING: {LoadEvent.CONFIRMED: LoadState.OVER, LoadEvent.FAILED: LoadState.OVER},
    LoadState.OVER: {},
}


class Order(NamedTuple):
    """What the scheduler asks a worker to load; ``blocks`` and ``into`` are equally long, in token order."""

    request: RequestId  # ours
    remote_request: RequestId  # P's
    engine: EngineId
    address: Address
    blocks: Sequence[BlockId]
    into: Sequence[BlockId]


class Result(NamedTuple):
    """A load ended; ``failure`` is empty when the blocks hold the right bytes.

    If it ``lingers``, its blocks must not be used by anybody before a :class:`LetGo` of the same request.
    """

    request: RequestId
    failure: str
    lingers: bool = False


class LetGo(NamedTuple):
    """Nothing can write any more into the blocks of a load that failed before."""

    request: RequestId


@dataclass(slots=True)
class _Load:
    order: Order
    deadline: float
    state: LoadState = LoadState.WAITING
    transfer: TransferId | None = None  # absent unless READING or GIVING_UP

    def on(self, event: LoadEvent) -> None:
        self.state = follow(TRANSITIONS, self.state, event, f"load of {self.order.request}")


class Reader:
    """Runs on the transfer thread, which owns every NIXL call."""

    def __init__(
        self, link: Link, mover: Mover, peers: PeerBook, tally: Tally, own: RankInfo, *, ranks: int, timeout: float
    ) -> None:
        self._link = link
        self._mover = mover
        self._peers = peers
        self._tally = tally
        self._own = own
        self._ranks = ranks
        self._timeout = timeout
        self._loads: dict[RequestId, _Load] = {}
        self._attached: dict[EngineId, tuple[str, RankInfo]] = {}  # NIXL's handle of a peer, and its memory
        self._results: list[Result | LetGo] = []

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, order: Order, *, now: float) -> None:
        """Start a load. Its end comes out of :meth:`take_results`, at the latest ``timeout`` from now."""
        if order.request in self._loads:
            raise IllegalTransition(f"request {order.request} is loaded twice")
        load = self._loads[order.request] = _Load(order, now + self._timeout)
        peer = self._peers.approach(order.engine, order.address, now=now)
        if peer.state is PeerState.MET:
            self._start(load)
        elif peer.state is PeerState.REFUSED:
            self._fail(load, "loads_failed_handshake", f"{peer.address} was not met: {peer.reason}")

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in what happened on a connection we opened."""
        match event:
            case Received(conn, Fenced(request, held)):
                self._judge(conn, request, held=held)
            case Received(conn, _):
                self._link.close(conn)
                self._peer_changed(self._peers.on(Lost(conn, "it broke the protocol"), now=now), now)
            case _:
                self._peer_changed(self._peers.on(event, now=now), now)

    def advance(self, *, now: float) -> float | None:
        """Look at NIXL and at the deadlines; return when to be called again at the latest."""
        for ended in self._mover.poll():
            self._ended(ended)
        for load in [load for load in self._loads.values() if now >= load.deadline]:
            if load.state is not LoadState.OVER:  # the one before it may have taken it along, with their peer
                self._time_out(load, now)
        self._peers.forget_refused(self._attached, now=now)
        return min((self._due(load, now) for load in self._loads.values()), default=None)

    def take_results(self) -> list[Result | LetGo]:
        """Return what ended since the last call, in order."""
        results, self._results = self._results, []
        return results

    def _due(self, load: _Load, now: float) -> float:
        match load.state:
            case LoadState.READING:
                return now + POLL_INTERVAL
            case LoadState.GIVING_UP:
                return now + LINGER_INTERVAL
            case _:
                return load.deadline

    def _peer_changed(self, peer: Peer | None, now: float) -> None:
        if peer is None:
            return
        loads = [load for load in self._loads.values() if load.order.engine == peer.engine]
        # Those still being given up have met the peer before: NIXL decides when they end, not this meeting.
        waiting = [load for load in loads if load.state is LoadState.WAITING]
        if peer.state is PeerState.MET:
            self._attach(peer, now)
        if peer.state is PeerState.MET:
            for load in waiting:
                self._start(load)
        elif peer.state is PeerState.REFUSED:
            for load in waiting:
                self._fail(load, "loads_failed_handshake", f"{peer.address} was not met: {peer.reason}")
        elif peer.state is PeerState.GONE:
            for load in loads:
                self._give_up(load, "loads_failed_peer", f"{peer.address} is gone: {peer.reason}")
            self._detach(peer.engine)

    def _attach(self, peer: Peer, now: float) -> None:
        """Make a peer's memory readable; a peer whose memory we cannot use is refused."""
        try:
            theirs = self._rank_of(peer)
            check_regions(self._own.regions, theirs.regions)
            self._attached[peer.engine] = self._mover.attach(theirs), theirs
        except ConnectorError as exc:
            self._link.close(peer.conn)
            self._peers.refuse(peer, str(exc), now=now)

    def _rank_of(self, peer: Peer) -> RankInfo:
        ranks = peer.welcome.ranks if peer.welcome is not None else ()
        found = next((info for info in ranks if info.rank == self._own.rank), None)
        if found is None:
            raise ConnectorError(f"engine {peer.engine} has no rank {self._own.rank}")
        return found

    def _detach(self, engine: EngineId) -> None:
        if (attached := self._attached.pop(engine, None)) is not None:
            self._mover.detach(attached[0])

    def _start(self, load: _Load) -> None:
        handle, theirs = self._attached[load.order.engine]
        try:
            remote = describe(theirs.regions, load.order.blocks)
            local = describe(self._own.regions, load.order.into)
            load.transfer = self._mover.read(handle, remote, local)
        except ConnectorError as exc:
            self._tell_dropped(load)
            self._fail(load, "loads_failed_transfer", str(exc))
        else:
            load.on(LoadEvent.STARTED)

    def _ended(self, ended: Ended) -> None:
        load = next(load for load in self._loads.values() if load.transfer == ended.transfer)
        load.transfer = None
        if load.state is LoadState.GIVING_UP:
            load.on(LoadEvent.LET_GO)
            del self._loads[load.order.request]
            self._results.append(LetGo(load.order.request))
        elif ended.outcome is Outcome.FAILED:
            self._tell_dropped(load)
            self._fail(load, "loads_failed_transfer", f"NIXL: {ended.reason}")
        else:
            load.on(LoadEvent.READ)
            self._tally.moved(Sample(ended.seconds, ended.bytes, ended.descriptors))
            self._tell(load, Done(load.order.remote_request, load.order.request, self._own.rank, self._ranks))

    def _judge(self, conn: ConnId, request: RequestId, *, held: bool) -> None:
        """Apply P's verdict on one read; a load that was given up meanwhile, or is another peer's, does not care."""
        load, peer = self._loads.get(request), self._peers.find(conn)
        if load is None or load.state is not LoadState.CONFIRMING or peer is None or peer.engine != load.order.engine:
            return
        if held:
            load.on(LoadEvent.CONFIRMED)
            self._tally.count("loads")
            self._end(load, "")
        else:
            self._tally.count("reads_unfenced")
            self._fail(load, "loads_failed_lease", "its lease was over before the read ended")

    def _time_out(self, load: _Load, now: float) -> None:
        """Give up a load, and with it a peer that let a read or a question time out: it does not answer."""
        peer = self._peers.get(load.order.engine)
        hung = load.state in (LoadState.READING, LoadState.CONFIRMING)
        self._give_up(load, "loads_failed_timeout", f"not loaded within {self._timeout:g} s")
        if hung and peer is not None and peer.state is PeerState.MET:
            self._peers.leave(peer, "it does not answer")
            self._peer_changed(peer, now)

    def _give_up(self, load: _Load, counter: str, why: str) -> None:
        if load.state is LoadState.GIVING_UP:
            return
        self._tell_dropped(load)
        if load.transfer is None:
            self._fail(load, counter, why)
        else:
            load.on(LoadEvent.CANCELLED)
            self._mover.cancel(load.transfer)
            self._tally.count(counter)
            self._results.append(Result(load.order.request, why, lingers=True))

    def _fail(self, load: _Load, counter: str, why: str) -> None:
        load.on(LoadEvent.FAILED)
        self._tally.count(counter)
        self._end(load, why)

    def _end(self, load: _Load, failure: str) -> None:
        del self._loads[load.order.request]
        self._results.append(Result(load.order.request, failure))

    def _tell_dropped(self, load: _Load) -> None:
        self._tell(load, Drop((load.order.remote_request,)))

    def _tell(self, load: _Load, message: Done | Drop) -> None:
        peer = self._peers.get(load.order.engine)
        if peer is not None and peer.state is PeerState.MET:
            self._link.send(peer.conn, message)
