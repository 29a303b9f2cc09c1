"""The prefill engines a decode engine knows, and how that changes.

The table is the life of a peer; what is not in it raises. A peer is known by its engine
id: an engine that restarts on the same address is another peer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import Address, ConnId, EngineId
from xpyd_connector.core.messages import PROTOCOL, Fingerprint, Welcome
from xpyd_connector.core.ports import Failed, Link, LinkEvent, Lost, Met
from xpyd_connector.core.state_machine import follow

QUIET = 1800.0  # s without a word of a peer after which it may be closing the connection: half of its IDLE_TIMEOUT
MAX_BACKOFF = 30.0  # s between two attempts to meet a peer that refuses


class PeerState(Enum):
    """Where a peer is in its life."""

    MEETING = auto()
    MET = auto()
    REFUSED = auto()  # kept only to remember when to try again
    GONE = auto()


class PeerEvent(Enum):
    """What can happen to a peer."""

    WELCOMED = auto()
    TURNED_AWAY = auto()  # unreachable, incompatible, or another engine by now
    RETRIED = auto()
    LEFT = auto()  # its connection closed, or we forgot it


TRANSITIONS: Final[Mapping[PeerState, Mapping[PeerEvent, PeerState]]] = {
    PeerState.MEETING: {
        PeerEvent.WELCOMED: PeerState.MET,
        PeerEvent.TURNED_AWAY: PeerState.REFUSED,
    },
    PeerState.MET: {PeerEvent.TURNED_AWAY: PeerState.REFUSED, PeerEvent.LEFT: PeerState.GONE},
    PeerState.REFUSED: {PeerEvent.RETRIED: PeerState.MEETING, PeerEvent.LEFT: PeerState.GONE},
    PeerState.GONE: {},
}


@dataclass(slots=True)
class Peer:
    """One remote engine. Everything we know about it lives here and dies with it."""

    engine: EngineId
    address: Address
    conn: ConnId
    state: PeerState = PeerState.MEETING
    welcome: Welcome | None = None  # absent until it is met
    reason: str = ""  # why it was refused, or is gone
    failures: int = 0
    retry_at: float = 0.0
    heard_at: float = -inf  # when it last answered
    asked_at: float | None = None  # when the oldest question was put that it has not answered (push)
    is_silent: bool = False  # gone without a word: it may well live

    def on(self, event: PeerEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = follow(TRANSITIONS, self.state, event, f"peer {self.engine}")

    def is_quiet(self, *, now: float) -> bool:
        """Whether it may be closing the connection: what is said over it now may be lost."""
        return now >= self.heard_at + QUIET


class PeerBook:
    """Meets peers on demand: once, however many requests wait, and again after a pause if they refuse."""

    def __init__(self, link: Link, own: Fingerprint, tally: Tally, *, retry_after: float) -> None:
        self._link = link
        self._own = own
        self._tally = tally
        self._retry_after = retry_after
        self._peers: dict[EngineId, Peer] = {}
        self._by_conn: dict[ConnId, Peer] = {}  # those that are met, or being met
        self._refused: dict[EngineId, Peer] = {}
        self._look_at = inf  # when the first of the refused may be forgotten

    def __len__(self) -> int:
        return len(self._peers)

    def approach(self, engine: EngineId, address: Address, *, now: float) -> Peer:
        """Return the peer, starting to meet it if it is new, its pause is over or it is said to be elsewhere."""
        peer = self._peers.get(engine)
        if peer is None:
            peer = self._peers[engine] = Peer(engine, address, self._link.meet(address, engine))
            self._by_conn[peer.conn] = peer
        elif peer.state is PeerState.REFUSED and (now >= peer.retry_at or address != peer.address):
            peer.on(PeerEvent.RETRIED)
            del self._refused[engine]
            peer.address, peer.conn = address, self._link.meet(address, engine)
            self._by_conn[peer.conn] = peer
        return peer

    def get(self, engine: EngineId) -> Peer | None:
        """Return a peer that is known, in whatever state."""
        return self._peers.get(engine)

    def find(self, conn: ConnId) -> Peer | None:
        """Return the peer behind a connection."""
        return self._by_conn.get(conn)

    def on(self, event: LinkEvent, *, now: float) -> Peer | None:
        """Take in what happened to a connection we opened; return the peer whose state changed."""
        peer = self.find(event.conn)
        match event:
            case Met(conn, welcome) if peer is not None:
                if reason := self._objection(peer, welcome):
                    self._link.close(conn)
                    self.refuse(peer, reason, now=now)
                else:
                    peer.on(PeerEvent.WELCOMED)
                    peer.welcome, peer.heard_at = welcome, now
                    self._tally.count("handshakes")
            case Failed(_, reason) if peer is not None:
                self.refuse(peer, reason, now=now)
            case Lost(_, reason, is_silent) if peer is not None:
                self._forget(peer)
                peer.reason, peer.is_silent = reason, is_silent
                peer.on(PeerEvent.LEFT)
                self._tally.count("peers_lost")
            case _:
                return None
        return peer

    def refuse(self, peer: Peer, reason: str, *, now: float) -> None:
        """Turn a peer away for a while that doubles with every failure in a row."""
        peer.on(PeerEvent.TURNED_AWAY)
        peer.reason, peer.welcome = reason, None
        peer.retry_at = now + min(MAX_BACKOFF, self._retry_after * 2 ** min(peer.failures, 16))
        peer.failures += 1
        self._by_conn.pop(peer.conn, None)
        self._refused[peer.engine] = peer
        self._look_at = min(self._look_at, peer.retry_at + MAX_BACKOFF)
        self._tally.count("handshakes_failed")

    def leave(self, peer: Peer, reason: str) -> None:
        """Close the connection to a peer that no longer answers; the next request meets it again."""
        self._forget(peer)
        peer.reason = reason
        self._link.close(peer.conn)
        peer.on(PeerEvent.LEFT)
        self._tally.count("peers_lost")

    def forget_refused(self, wanted: Iterable[EngineId], *, now: float) -> None:
        """Drop peers that refused, whose pause is long over and whom nobody wants: engines come and go for ever."""
        if now < self._look_at:
            return
        keep = set(wanted)
        for peer in list(self._refused.values()):
            if peer.engine not in keep and now >= peer.retry_at + MAX_BACKOFF:
                self._forget(peer)
                peer.on(PeerEvent.LEFT)
        self._look_at = min((peer.retry_at + MAX_BACKOFF for peer in self._refused.values()), default=inf)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.engine]
        self._by_conn.pop(peer.conn, None)
        self._refused.pop(peer.engine, None)

    def _objection(self, peer: Peer, welcome: Welcome) -> str | None:
        if welcome.protocol != PROTOCOL:
            return f"it speaks protocol {welcome.protocol}, we speak {PROTOCOL}"
        if welcome.engine != peer.engine:
            return f"engine {welcome.engine} answers at {peer.address} now, the request was prefilled by {peer.engine}"
        return mismatch(self._own, welcome.fingerprint)


def mismatch(ours: Fingerprint, theirs: Fingerprint) -> str | None:
    """Name the first thing in which two engines differ with both values, or return None."""
    for name in Fingerprint.__struct_fields__:
        if (our := getattr(ours, name)) != (their := getattr(theirs, name)):
            return f"its {name.replace('_', ' ')} is {their!r}, ours is {our!r}; they must be equal"
    return None
