"""D's scheduler: renews the leases of the requests that wait here for another engine's blocks.

Renewals begin when a request enters the scheduler, queued or not, so an overloaded decode engine
loses no lease. A lease is dropped as soon as its request no longer needs it. If the engine's loop
hangs, nothing is renewed after a while: this engine would not read the blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import earliest
from pdrelay_connector.core.ids import ConnId, EngineId, RequestId
from pdrelay_connector.core.lease.kv_params import PullParams, PushParams
from pdrelay_connector.core.messages import (
    MAX_REASON,
    DropLeases,
    HeartbeatReply,
    LeasesLost,
    Objection,
    ReadsStarted,
    RenewLeases,
    by_message,
)
from pdrelay_connector.core.ports import ConnectionLost, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.results import HandshakeEnded, LeaseLost, PeerLost
from pdrelay_connector.core.session.peers import Peer, PeerState, PeerTable

RequestSet = dict[RequestId, None]  # a set that keeps its order
Params: TypeAlias = PullParams | PushParams
# in the duration of a lease, of which a renewal adds two thirds: three may be lost
BEATS: Final = 6
# P takes leases back in either state
_LISTENS: Final = (PeerState.CONNECTED, PeerState.INCOMPATIBLE)


@dataclass(slots=True)
class _EngineLeases:
    """The leases we need of one engine, and P's ids of those to drop and of those being read."""

    # by our own id
    params: dict[RequestId, Params] = field(default_factory=dict[RequestId, Params])
    # P's id -> ours
    by_remote: dict[RequestId, RequestSet] = field(default_factory=dict[RequestId, RequestSet])
    # our ids of those whose load is queued or running
    loading: RequestSet = field(default_factory=RequestSet)
    # whether they were to be read
    to_drop: dict[RequestId, bool] = field(default_factory=dict[RequestId, bool])
    to_read: RequestSet = field(default_factory=RequestSet)
    beat_at: float = inf  # when the next heartbeat is due

    def is_pulled(self, remote: RequestId) -> bool:
        """Whether one of P's requests was offered to be read."""
        return any(
            isinstance(self.params[own], PullParams) for own in self.by_remote.get(remote, ())
        )

    @property
    def read(self) -> RequestSet:
        """P's ids of the requests being loaded."""
        return {self.params[request].remote_request_id: None for request in self.loading}

    def add(self, request: RequestId, params: Params) -> None:
        """Add a request."""
        self.remove(request)
        self.params[request] = params
        self.by_remote.setdefault(params.remote_request_id, {})[request] = None
        self.to_drop.pop(params.remote_request_id, None)

    def remove(self, request: RequestId) -> Params | None:
        """Remove a request and return its parameters."""
        self.loading.pop(request, None)
        params = self.params.pop(request, None)
        if params is not None:
            ours = self.by_remote[params.remote_request_id]
            del ours[request]
            if not ours:
                del self.by_remote[params.remote_request_id]
                self.to_read.pop(params.remote_request_id, None)
        return params


class LeaseRenewer:
    """Runs on the control thread of the decode engine's scheduler process.

    ``last_turn`` returns when the engine's loop last turned (s); after ``loop_timeout`` without a
    turn, renewals stop.
    """

    def __init__(
        self,
        link: Link,
        peers: PeerTable,
        counters: Counters,
        *,
        heartbeat_interval: float,
        loop_timeout: float = inf,
        last_turn: Callable[[], float] = lambda: inf,
        tells_pulled: bool = False,
    ) -> None:
        """``tells_pulled``: renewals say whether P's blocks are read or pushed (mode auto)."""
        self._tells_pulled = tells_pulled
        self._link = link
        self._peers = peers
        self._counters = counters
        self._interval = heartbeat_interval
        self._loop_timeout = loop_timeout
        self._last_turn = last_turn
        self._leases_by_engine: dict[EngineId, _EngineLeases] = {}
        self._pending: dict[EngineId, None] = {}  # engines that get a message in this turn
        self._lost: list[LeaseLost] = []
        self._awaited: set[EngineId] = set()  # engines whose handshake is to be reported
        self._handshakes: list[HandshakeEnded] = []
        self._lost_peers: list[PeerLost] = []
        self.is_withholding = False  # renews nothing, because the engine's loop hangs

    def __len__(self) -> int:
        return sum(len(leases.params) for leases in self._leases_by_engine.values())

    def start_renewing(self, request: RequestId, params: Params, *, now: float) -> None:
        """Start renewing the lease of a request that has arrived here."""
        leases = self._leases_by_engine.setdefault(params.remote_engine_id, _EngineLeases())
        leases.add(request, params)
        peer = self._peers.ensure_connected(
            params.remote_engine_id, params.address, now=now, is_offer=True
        )
        if peer.state is PeerState.CONNECTED:
            self._renew(peer, leases, (params.remote_request_id,), now)
        leases.beat_at = min(leases.beat_at, now + self._interval_of(peer))

    def report_handshake(self, engine: EngineId, *, now: float) -> None:
        """Report the end of the engine's handshake: now, if it has ended, or else later."""
        self._awaited.add(engine)
        self._report(self._peers.get(engine), now)

    def take_lost_peers(self) -> list[PeerLost]:
        """Return the engines whose connections have ended since the last call."""
        lost = self._lost_peers
        self._lost_peers = []
        return lost

    def stop_renewing(self, request: RequestId, engine: EngineId) -> None:
        """Stop renewing: the worker has ended its read and P knows."""
        if (leases := self._leases_by_engine.get(engine)) is not None:
            leases.remove(request)
            self._prune(engine, leases)

    def release(self, request: RequestId, engine: EngineId) -> None:
        """Stop renewing, and drop the lease, in one message with others of this iteration.

        The lease stays if another request here (one prompt, n answers) needs the same blocks.
        """
        if (leases := self._leases_by_engine.get(engine)) is None or (
            params := leases.remove(request)
        ) is None:
            return
        if params.remote_request_id not in leases.by_remote:
            self._counters.count("drops_sent")
            leases.to_drop[params.remote_request_id] = isinstance(params, PullParams)
            self._pending[engine] = None
        self._prune(engine, leases)

    def give_up(self) -> None:
        """Drop all leases: this engine sleeps, and then its requests compute their own prompts."""
        for engine, leases in list(self._leases_by_engine.items()):
            for request in list(leases.params):
                self._lost.append(LeaseLost(request))
                self.release(request, engine)

    def read_started(self, request: RequestId, engine: EngineId) -> None:
        """Report to P now, and with each heartbeat until its end, that our workers read blocks.

        P believes it for ``transfer_timeout``; a load that waits for host memory takes longer.
        """
        leases = self._leases_by_engine.get(engine)
        if leases is not None and (params := leases.params.get(request)) is not None:
            leases.loading[request] = None
            leases.to_read[params.remote_request_id] = None
            self._pending[engine] = None

    def take_handshakes(self) -> list[HandshakeEnded]:
        """Return the handshakes to be reported that have ended since the last call."""
        ended = self._handshakes
        self._handshakes = []
        return ended

    def take_lost(self) -> list[LeaseLost]:
        """Return the requests whose leases were lost since the last call."""
        lost = self._lost
        self._lost = []
        return lost

    def on(self, event: LinkEvent, *, now: float) -> Peer | None:
        """Handle an event of a connection that we opened; return the peer whose state changed."""
        changed: Peer | None = None
        match event:
            case MessageReceived(conn, LeasesLost(requests)):
                self._on_leases_lost(conn, requests)
            case MessageReceived(conn, HeartbeatReply()):
                if (peer := self._peers.find(conn)) is not None:
                    peer.unanswered_since = None
                    peer.last_heard_at = now
            case MessageReceived(conn, _):
                self._link.close(conn)
                changed = self._peers.on(
                    ConnectionLost(conn, "it broke the protocol", silent=True), now=now
                )
            case _:
                changed = self._peers.on(event, now=now)
        self._on_peer_changed(changed, now)
        return changed

    def advance(self, *, now: float) -> float | None:
        """Send queued messages and due heartbeats; return when the next heartbeat is due."""
        self._send_pending()
        self._peers.forget_refused(self._leases_by_engine, now=now)
        patience_ends = self._lose_patience(now)
        if not self._leases_by_engine:
            self.is_withholding = False
            return patience_ends
        due = [
            (engine, leases)
            for engine, leases in self._leases_by_engine.items()
            if now >= leases.beat_at
        ]
        if due:
            self.is_withholding = now - self._last_turn() >= self._loop_timeout
        for engine, leases in due:
            self._send_heartbeat(engine, leases, now)
            peer = self._peers.get(engine)
            leases.beat_at = now + (self._interval if peer is None else self._interval_of(peer))
        return earliest(
            patience_ends, *(leases.beat_at for leases in self._leases_by_engine.values())
        )

    def _lose_patience(self, now: float) -> float | None:
        """Report peers that requests have waited for long enough; return when to check again."""
        awaited = [
            peer for engine in list(self._awaited) if (peer := self._peers.get(engine)) is not None
        ]
        for peer in awaited:
            self._report(peer, now)
        return earliest(*(peer.patience_ends for peer in awaited if peer.engine in self._awaited))

    def _interval_of(self, peer: Peer) -> float:
        """Return the s between two heartbeats: P's leases may be shorter than ours, or longer."""
        return min(self._interval, peer.lease / BEATS)

    def _send_heartbeat(self, engine: EngineId, leases: _EngineLeases, now: float) -> None:
        if not leases.params:
            return
        if self.is_withholding:
            self._counters.count("renewals_withheld", len(leases.by_remote))
            return
        params = next(iter(leases.params.values()))
        peer = self._peers.ensure_connected(engine, params.address, now=now)
        if peer.state is PeerState.CONNECTED:
            self._renew(peer, leases, leases.by_remote, now)
            self._send_reads(peer, leases.read)

    def _send_pending(self) -> None:
        """Send each connected engine its messages; others get them after their handshake."""
        unsaid = self._pending
        self._pending = {}
        for engine in unsaid:
            leases = self._leases_by_engine.get(engine)
            peer = self._peers.get(engine)
            if leases is None or (peer is not None and peer.state is PeerState.CONNECTING):
                continue
            if peer is not None and peer.state in _LISTENS:
                self._say(peer, leases)
            self._clear_pending(engine, leases)

    def _say(self, peer: Peer, leases: _EngineLeases) -> None:
        self._send_reads(peer, leases.to_read)
        for pulled, requests in self._divided(leases.to_drop, leases.to_drop.__getitem__):
            for names in by_message(requests):
                self._link.send(peer.conn, DropLeases(names, pulled))

    def _divided(
        self, requests: Iterable[RequestId], is_pulled: Callable[[RequestId], bool]
    ) -> Iterator[tuple[bool, Sequence[RequestId]]]:
        """Divide requests by whether they were to be read, where P must know that."""
        names = list(requests)
        if not self._tells_pulled:
            yield False, names
            return
        for pulled in (False, True):
            yield pulled, [request for request in names if is_pulled(request) == pulled]

    def _send_reads(self, peer: Peer, requests: Iterable[RequestId]) -> None:
        for names in by_message(requests):
            self._link.send(peer.conn, ReadsStarted(names))

    def _clear_pending(self, engine: EngineId, leases: _EngineLeases) -> None:
        """Forget sent messages, and those of engines that are gone: they hold no blocks for us."""
        leases.to_drop.clear()
        leases.to_read.clear()
        self._prune(engine, leases)

    def _on_leases_lost(self, conn: ConnId, requests: Sequence[RequestId]) -> None:
        """Renew no more what P does not hold.

        The fence decides about a read that has begun; others must not begin.
        """
        self._counters.count("leases_lost", len(requests))
        peer = self._peers.find(conn)
        if peer is None or (leases := self._leases_by_engine.get(peer.engine)) is None:
            return
        for request in requests:
            for own in list(leases.by_remote.get(request, ())):
                self._lost.append(LeaseLost(own))
                leases.remove(own)
        self._prune(peer.engine, leases)

    def _report(self, peer: Peer | None, now: float) -> None:
        if peer is None or peer.engine not in self._awaited:
            return
        if peer.state is PeerState.CONNECTING and now < peer.patience_ends:
            return
        self._awaited.discard(peer.engine)
        if peer.state is PeerState.CONNECTING:
            ended = HandshakeEnded(
                peer.engine, failure="it does not answer, and did not before", is_final=False
            )
        elif peer.state is PeerState.CONNECTED:
            ended = HandshakeEnded(peer.engine)
        elif peer.is_incompatible:
            ended = HandshakeEnded(
                peer.engine,
                objection=peer.reason,
                is_final=peer.is_final,
                cause=peer.cause,
                is_absent=peer.has_ended,
            )
        else:
            ended = HandshakeEnded(
                peer.engine, failure=peer.reason, is_final=False, cause=peer.cause, is_absent=True
            )
        self._handshakes.append(ended)

    def _on_peer_changed(self, peer: Peer | None, now: float) -> None:
        self._report(peer, now)
        if peer is not None and peer.state is PeerState.GONE:
            self._lost_peers.append(PeerLost(peer.engine))
        leases = self._leases_by_engine.get(peer.engine) if peer is not None else None
        if peer is None or leases is None:
            return
        if peer.state is PeerState.CONNECTED:
            self._renew(peer, leases, leases.by_remote, now)
            leases.beat_at = min(leases.beat_at, now + self._interval_of(peer))
            leases.to_read.update(leases.read)  # P may not have heard it over the connection before
        if peer.state is PeerState.INCOMPATIBLE:
            self._link.send(peer.conn, Objection(peer.reason[:MAX_REASON]))
        if peer.state in _LISTENS:
            self._say(peer, leases)
        self._clear_pending(peer.engine, leases)

    def _renew(
        self, peer: Peer, leases: _EngineLeases, requests: Iterable[RequestId], now: float
    ) -> None:
        sent_names = 0
        for pulled, some in self._divided(requests, leases.is_pulled):
            for names in by_message(some):
                self._link.send(peer.conn, RenewLeases(names, pulled))
                sent_names += len(names)
        if sent_names and peer.unanswered_since is None:
            peer.unanswered_since = now
        self._counters.count("renewals_sent", sent_names)

    def _prune(self, engine: EngineId, leases: _EngineLeases) -> None:
        if not leases.params and not leases.to_drop:
            self._leases_by_engine.pop(engine, None)
