"""The decode scheduler's half: keep other engines' blocks alive for the requests that wait here.

A lease is renewed from the moment its request enters the scheduler, queued or not, so that
an overloaded decode engine loses nothing; it is given back the moment nobody wants it. An engine whose loop hangs
renews nothing after a while: nothing here will read the blocks that it keeps others from.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import ConnId, EngineId, RequestId
from xpyd_connector.core.lease.kv_params import Booking, Offer
from xpyd_connector.core.messages import MAX_IDS, Alive, Drop, Lapsed, Reads, Renew
from xpyd_connector.core.ports import Link, LinkEvent, Lost, Received
from xpyd_connector.core.results import LeaseLost
from xpyd_connector.core.session.peers import Peer, PeerBook, PeerState

Names = dict[RequestId, None]  # a set that keeps its order


@dataclass(slots=True)
class _Wanted:
    """What we want of one engine, and what it should hear: P's ids of what we do not want, and of what we read."""

    offers: dict[RequestId, Offer | Booking] = field(default_factory=dict[RequestId, Offer | Booking])  # by our own id
    by_remote: dict[RequestId, Names] = field(default_factory=dict[RequestId, Names])  # P's id -> ours
    loading: Names = field(default_factory=Names)  # our ids of those whose load is queued or running
    to_drop: Names = field(default_factory=Names)
    to_read: Names = field(default_factory=Names)

    @property
    def read(self) -> Names:
        """P's ids of what is being loaded."""
        return {self.offers[request].remote_request_id: None for request in self.loading}

    def add(self, request: RequestId, offer: Offer | Booking) -> None:
        """Want the KV of a request."""
        self.remove(request)
        self.offers[request] = offer
        self.by_remote.setdefault(offer.remote_request_id, {})[request] = None
        self.to_drop.pop(offer.remote_request_id, None)

    def remove(self, request: RequestId) -> Offer | Booking | None:
        """Want it no more; return what was wanted."""
        self.loading.pop(request, None)
        offer = self.offers.pop(request, None)
        if offer is not None:
            ours = self.by_remote[offer.remote_request_id]
            del ours[request]
            if not ours:
                del self.by_remote[offer.remote_request_id]
                self.to_read.pop(offer.remote_request_id, None)
        return offer


class Borrower:
    """Runs on the control thread of the decode engine's scheduler process.

    ``last_turn`` says when the engine's loop last turned (s); when that is ``loop_timeout`` ago, nothing is renewed.
    """

    def __init__(
        self,
        link: Link,
        peers: PeerBook,
        tally: Tally,
        *,
        heartbeat_interval: float,
        loop_timeout: float = inf,
        last_turn: Callable[[], float] = lambda: inf,
    ) -> None:
        self._link = link
        self._peers = peers
        self._tally = tally
        self._interval = heartbeat_interval
        self._loop_timeout = loop_timeout
        self._last_turn = last_turn
        self._wanted: dict[EngineId, _Wanted] = {}
        self._unsaid: dict[EngineId, None] = {}  # engines that should hear something with this turn
        self._next_beat: float | None = None  # absent while nothing is wanted
        self._lost: list[LeaseLost] = []
        self.is_withholding = False  # renews nothing, because the engine's loop hangs

    def __len__(self) -> int:
        return sum(len(wanted.offers) for wanted in self._wanted.values())

    def want(self, request: RequestId, offer: Offer | Booking, *, now: float) -> None:
        """Start renewing the lease of a request that has arrived here."""
        self._wanted.setdefault(offer.remote_engine_id, _Wanted()).add(request, offer)
        peer = self._peers.approach(offer.remote_engine_id, offer.address, now=now)
        if peer.state is PeerState.MET:
            self._renew(peer, (offer.remote_request_id,), now)
        if self._next_beat is None:
            self._next_beat = now + self._interval

    def settle(self, request: RequestId, engine: EngineId) -> None:
        """Stop renewing: the worker has read the blocks, or failed to, and has told P."""
        self._forget(request, engine)

    def give_back(self, request: RequestId, engine: EngineId) -> None:
        """Stop renewing and tell P, with all others that are given back in this turn: nobody will read these blocks.

        Nothing is told while another request here (one prompt, n answers) still wants the same blocks.
        """
        if (wanted := self._wanted.get(engine)) is None or (offer := wanted.remove(request)) is None:
            return
        if offer.remote_request_id not in wanted.by_remote:
            self._tally.count("drops_sent")
            wanted.to_drop[offer.remote_request_id] = None
            self._unsaid[engine] = None
        self._prune(engine, wanted)

    def reading(self, request: RequestId, engine: EngineId) -> None:
        """Tell P, with this turn and each heartbeat until the load is over, that our workers read a request's blocks.

        P believes it for ``transfer_timeout``; a load that queues for room in host memory takes longer.
        """
        wanted = self._wanted.get(engine)
        if wanted is not None and (offer := wanted.offers.get(request)) is not None:
            wanted.loading[request] = None
            wanted.to_read[offer.remote_request_id] = None
            self._unsaid[engine] = None

    def take_lost(self) -> list[LeaseLost]:
        """Return the requests whose leases were lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def on(self, event: LinkEvent, *, now: float) -> Peer | None:
        """Take in what happened on a connection we opened; return the peer whose state changed."""
        changed: Peer | None = None
        match event:
            case Received(conn, Lapsed(requests)):
                self._lapsed(conn, requests)
            case Received(conn, Alive()):
                if (peer := self._peers.find(conn)) is not None:
                    peer.asked_at, peer.heard_at = None, now
            case Received(conn, _):
                self._link.close(conn)
                changed = self._peers.on(Lost(conn, "it broke the protocol", silent=True), now=now)
            case _:
                changed = self._peers.on(event, now=now)
        self._peer_changed(changed, now)
        return changed

    def advance(self, *, now: float) -> float | None:
        """Say what is to be said, and send the heartbeats that are due; return when the next one is."""
        self._speak()
        self._peers.forget_refused(self._wanted, now=now)
        if not self._wanted:
            self._next_beat, self.is_withholding = None, False
        elif self._next_beat is not None and now >= self._next_beat:
            self._next_beat = now + self._interval
            self.is_withholding = now - self._last_turn() >= self._loop_timeout
            for engine, wanted in self._wanted.items():
                self._beat(engine, wanted, now)
        return self._next_beat

    def _beat(self, engine: EngineId, wanted: _Wanted, now: float) -> None:
        if not wanted.offers:
            return
        if self.is_withholding:
            self._tally.count("renewals_withheld", len(wanted.by_remote))
            return
        offer = next(iter(wanted.offers.values()))
        peer = self._peers.approach(engine, offer.address, now=now)
        if peer.state is PeerState.MET:
            self._renew(peer, wanted.by_remote, now)
            self._say_read(peer, wanted.read)

    def _speak(self) -> None:
        """Tell each engine what it should hear; one that is still being met hears it then."""
        unsaid, self._unsaid = self._unsaid, {}
        for engine in unsaid:
            wanted, peer = self._wanted.get(engine), self._peers.get(engine)
            if wanted is None or (peer is not None and peer.state is PeerState.MEETING):
                continue
            if peer is not None and peer.state is PeerState.MET:
                self._say(peer, wanted)
            self._said(engine, wanted)

    def _say(self, peer: Peer, wanted: _Wanted) -> None:
        self._say_read(peer, wanted.to_read)
        for names in _in_pieces(wanted.to_drop):
            self._link.send(peer.conn, Drop(names))

    def _say_read(self, peer: Peer, requests: Iterable[RequestId]) -> None:
        for names in _in_pieces(requests):
            self._link.send(peer.conn, Reads(names))

    def _said(self, engine: EngineId, wanted: _Wanted) -> None:
        """Forget what was told, or what nobody can be told: an engine that is gone has no blocks of ours."""
        wanted.to_drop.clear()
        wanted.to_read.clear()
        self._prune(engine, wanted)

    def _lapsed(self, conn: ConnId, requests: Iterable[RequestId]) -> None:
        """Renew no more what P does not hold. The fence decides about a read that has begun; others must not begin."""
        peer = self._peers.find(conn)
        wanted = self._wanted.get(peer.engine) if peer is not None else None
        for request in requests:
            self._tally.count("lapsed")
            for own in list(wanted.by_remote.get(request, ())) if wanted is not None else ():
                self._lost.append(LeaseLost(own))
                if wanted is not None:
                    wanted.remove(own)
        if peer is not None and wanted is not None:
            self._prune(peer.engine, wanted)

    def _peer_changed(self, peer: Peer | None, now: float) -> None:
        wanted = self._wanted.get(peer.engine) if peer is not None else None
        if peer is None or wanted is None:
            return
        if peer.state is PeerState.MET:
            self._renew(peer, wanted.by_remote, now)
            wanted.to_read.update(wanted.read)  # P may not have heard it over the connection before
            self._say(peer, wanted)
        self._said(peer.engine, wanted)

    def _renew(self, peer: Peer, requests: Iterable[RequestId], now: float) -> None:
        sent = 0
        for names in _in_pieces(requests):
            self._link.send(peer.conn, Renew(names))
            sent += len(names)
        if sent and peer.asked_at is None:
            peer.asked_at = now
        self._tally.count("renewals_sent", sent)

    def _forget(self, request: RequestId, engine: EngineId) -> None:
        if (wanted := self._wanted.get(engine)) is not None:
            wanted.remove(request)
            self._prune(engine, wanted)

    def _prune(self, engine: EngineId, wanted: _Wanted) -> None:
        if not wanted.offers and not wanted.to_drop:
            self._wanted.pop(engine, None)


def _in_pieces(requests: Iterable[RequestId]) -> Iterator[tuple[RequestId, ...]]:
    """Cut names into as many as one message takes."""
    names = tuple(requests)
    for start in range(0, len(names), MAX_IDS):
        yield names[start : start + MAX_IDS]
