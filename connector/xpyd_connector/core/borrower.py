"""The decode scheduler's half: keep other engines' blocks alive for the requests that wait here.

A lease is renewed from the moment its request enters the scheduler, queued or not, so that
an overloaded decode engine loses nothing; it is given back the moment nobody wants it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from xpyd_connector.core.ids import EngineId, RequestId
from xpyd_connector.core.messages import MAX_IDS, Alive, Drop, Lapsed, Renew
from xpyd_connector.core.offers import Booking, Offer
from xpyd_connector.core.peers import Peer, PeerBook, PeerState
from xpyd_connector.core.ports import Link, LinkEvent, Lost, Received
from xpyd_connector.core.tally import Tally


@dataclass(slots=True)
class _Wanted:
    """What we want of one engine: our request id -> its request id; and what it should hear that we do not want."""

    offers: dict[RequestId, Offer | Booking] = field(default_factory=dict[RequestId, Offer | Booking])
    to_drop: list[RequestId] = field(default_factory=list[RequestId])


class Borrower:
    """Runs on the control thread of the decode engine's scheduler process."""

    def __init__(self, link: Link, peers: PeerBook, tally: Tally, *, heartbeat_interval: float) -> None:
        self._link = link
        self._peers = peers
        self._tally = tally
        self._interval = heartbeat_interval
        self._wanted: dict[EngineId, _Wanted] = {}
        self._next_beat: float | None = None  # absent while nothing is wanted

    def __len__(self) -> int:
        return sum(len(wanted.offers) for wanted in self._wanted.values())

    def want(self, request: RequestId, offer: Offer | Booking, *, now: float) -> None:
        """Start renewing the lease of a request that has arrived here."""
        self._wanted.setdefault(offer.remote_engine_id, _Wanted()).offers[request] = offer
        peer = self._peers.approach(offer.remote_engine_id, offer.address, now=now)
        if peer.state is PeerState.MET:
            self._renew(peer, [offer], now)
        if self._next_beat is None:
            self._next_beat = now + self._interval

    def settle(self, request: RequestId, engine: EngineId) -> None:
        """Stop renewing: the worker has read the blocks, or failed to, and has told P."""
        self._forget(request, engine)

    def give_back(self, request: RequestId, engine: EngineId) -> None:
        """Stop renewing and tell P at once: nobody will read these blocks."""
        if (offer := self._forget(request, engine)) is None or self._wants(engine, offer):
            return
        self._tally.count("drops_sent")
        peer = self._peers.get(engine)
        if peer is not None and peer.state is PeerState.MET:
            self._link.send(peer.conn, Drop((offer.remote_request_id,)))
        elif peer is not None and peer.state is PeerState.MEETING:
            self._wanted.setdefault(engine, _Wanted()).to_drop.append(offer.remote_request_id)

    def on(self, event: LinkEvent, *, now: float) -> Peer | None:
        """Take in what happened on a connection we opened; return the peer whose state changed."""
        changed: Peer | None = None
        match event:
            case Received(_, Lapsed(requests)):
                self._tally.count("lapsed", len(requests))  # the read's own fence decides what that means
            case Received(conn, Alive()):
                if (peer := self._peers.find(conn)) is not None:
                    peer.asked_at = None
            case Received(conn, _):
                self._link.close(conn)
                changed = self._peers.on(Lost(conn, "it broke the protocol", silent=True), now=now)
            case _:
                changed = self._peers.on(event, now=now)
        self._peer_changed(changed, now)
        return changed

    def advance(self, *, now: float) -> float | None:
        """Send the heartbeats that are due; return when the next one is."""
        self._peers.forget_refused(self._wanted, now=now)
        if not self._wanted:
            self._next_beat = None
        elif self._next_beat is not None and now >= self._next_beat:
            self._next_beat = now + self._interval
            for engine, wanted in self._wanted.items():
                self._beat(engine, wanted, now)
        return self._next_beat

    def _beat(self, engine: EngineId, wanted: _Wanted, now: float) -> None:
        if not wanted.offers:
            return
        offer = next(iter(wanted.offers.values()))
        peer = self._peers.approach(engine, offer.address, now=now)
        if peer.state is PeerState.MET:
            self._renew(peer, wanted.offers.values(), now)

    def _peer_changed(self, peer: Peer | None, now: float) -> None:
        wanted = self._wanted.get(peer.engine) if peer is not None else None
        if peer is None or wanted is None:
            return
        if peer.state is PeerState.MET:
            self._renew(peer, wanted.offers.values(), now)
            for start in range(0, len(wanted.to_drop), MAX_IDS):
                self._link.send(peer.conn, Drop(tuple(wanted.to_drop[start : start + MAX_IDS])))
        wanted.to_drop.clear()  # told, or the engine is gone and its blocks with it
        self._prune(peer.engine, wanted)

    def _renew(self, peer: Peer, offers: Iterable[Offer | Booking], now: float) -> None:
        ids = tuple(dict.fromkeys(offer.remote_request_id for offer in offers))
        for start in range(0, len(ids), MAX_IDS):
            self._link.send(peer.conn, Renew(ids[start : start + MAX_IDS]))
        if ids and peer.asked_at is None:
            peer.asked_at = now
        self._tally.count("renewals_sent", len(ids))

    def _forget(self, request: RequestId, engine: EngineId) -> Offer | Booking | None:
        wanted = self._wanted.get(engine)
        offer = wanted.offers.pop(request, None) if wanted is not None else None
        if wanted is not None:
            self._prune(engine, wanted)
        return offer

    def _wants(self, engine: EngineId, offer: Offer | Booking) -> bool:
        """Whether another request here (one prompt, n answers) still wants the same blocks."""
        wanted = self._wanted.get(engine)
        return wanted is not None and any(
            other.remote_request_id == offer.remote_request_id for other in wanted.offers.values()
        )

    def _prune(self, engine: EngineId, wanted: _Wanted) -> None:
        if not wanted.offers and not wanted.to_drop:
            self._wanted.pop(engine, None)
