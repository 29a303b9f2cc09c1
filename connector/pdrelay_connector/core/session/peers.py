"""The prefill engines that a decode engine knows, and the state of each.

A peer is identified by its engine id: an engine that restarts at the same address is another peer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Final

from pdrelay_connector.core.counters import UNREACHABLE, Counters
from pdrelay_connector.core.ids import Address, ConnId, EngineId
from pdrelay_connector.core.layout.shape_checks import difference
from pdrelay_connector.core.messages import PROTOCOL, Fingerprint, RankInfo, Welcome, printable
from pdrelay_connector.core.ports import (
    ConnectFailed,
    ConnectionLost,
    Link,
    LinkEvent,
    PeerConnected,
)
from pdrelay_connector.core.state_machine import transition

# s without a word of a peer after which it may be closing the connection: half of its IDLE_TIMEOUT
QUIET = 1800.0
MAX_BACKOFF = 30.0  # s between two attempts to meet a peer that refuses
# s that requests wait for a peer that did not answer before: a handshake takes milliseconds, and
# one that hangs its whole timeout. The attempt goes on without them.
PATIENCE = 0.5
MAX_SILENT = 1024  # peers remembered for not having answered


class PeerState(Enum):
    """State of a peer."""

    CONNECTING = auto()
    CONNECTED = auto()
    # connected, only to give leases back: its KV is not loaded as long as it runs
    INCOMPATIBLE = auto()
    REFUSED = auto()  # kept only to remember when to try again
    GONE = auto()


class PeerEvent(Enum):
    """What can happen to a peer."""

    CONNECTED = auto()
    DIFFERS = auto()  # its fingerprint or its shapes
    REFUSED = auto()  # unreachable, or another engine by now
    RETRIED = auto()
    DISCONNECTED = auto()  # its connection closed, or we forgot it


TRANSITIONS: Final[Mapping[PeerState, Mapping[PeerEvent, PeerState]]] = {
    PeerState.CONNECTING: {
        PeerEvent.CONNECTED: PeerState.CONNECTED,
        PeerEvent.DIFFERS: PeerState.INCOMPATIBLE,
        PeerEvent.REFUSED: PeerState.REFUSED,
    },
    PeerState.INCOMPATIBLE: {PeerEvent.DISCONNECTED: PeerState.GONE},
    PeerState.CONNECTED: {
        PeerEvent.REFUSED: PeerState.REFUSED,
        PeerEvent.DISCONNECTED: PeerState.GONE,
    },
    PeerState.REFUSED: {
        PeerEvent.RETRIED: PeerState.CONNECTING,
        PeerEvent.DISCONNECTED: PeerState.GONE,
    },
    PeerState.GONE: {},
}


@dataclass(slots=True)
class Peer:
    """One remote engine, and everything we know of it."""

    engine: EngineId
    address: Address
    conn: ConnId
    state: PeerState = PeerState.CONNECTING
    welcome: Welcome | None = None  # absent until it is met
    reason: str = ""  # why it was refused, or is gone
    cause: str = UNREACHABLE  # the same as vllm:pdrelay_peer_loads names it
    is_incompatible: bool = False  # it answers, and that is the reason
    is_final: bool = False  # a reason that does not change while it runs
    # if it has been met before: its port is closed, or another engine listens there
    has_ended: bool = False
    is_elsewhere: bool = False  # on another machine
    tried_at: float = 0.0  # when the latest attempt to meet it began
    is_doubted: bool = False  # it did not answer before
    failures: int = 0
    retry_at: float = 0.0
    last_heard_at: float = -inf  # when it last answered
    unanswered_since: float | None = None  # when the oldest unanswered heartbeat was sent (push)
    is_silent: bool = False  # gone without closing its connection: it may still run
    # silent, and its kernel, or something between, has answered that there is no connection
    is_reset: bool = False

    def on(self, event: PeerEvent) -> None:
        """Move to the next state, or raise if the event makes no sense now."""
        self.state = transition(TRANSITIONS, self.state, event, f"peer {self.engine}")

    @property
    def ranks(self) -> Sequence[RankInfo]:
        """The ranks in its Welcome; empty before the handshake."""
        return self.welcome.ranks if self.welcome is not None else ()

    @property
    def patience_ends(self) -> float:
        """When requests stop waiting for a doubted peer's handshake; inf: with its attempt."""
        is_late = self.is_doubted and self.state is PeerState.CONNECTING
        return self.tried_at + PATIENCE if is_late else inf

    @property
    def lease(self) -> float:
        """Seconds of its leases before the first renewal; inf before the handshake."""
        return self.welcome.lease if self.welcome is not None else inf

    @property
    def is_refused(self) -> bool:
        """Whether no KV of it can be loaded now."""
        return self.state in (PeerState.REFUSED, PeerState.INCOMPATIBLE)

    def is_idle(self, *, now: float) -> bool:
        """Whether P may be closing this connection: a message sent over it may be lost."""
        return now >= self.last_heard_at + QUIET


class PeerTable:
    """Connects to peers on demand, once for all waiting requests; after a refusal, with pauses.

    ``ranks``: of this engine, if it reads; peers of other shapes are refused, too.
    """

    def __init__(
        self,
        link: Link,
        own: Fingerprint,
        counters: Counters,
        *,
        retry_after: float,
        ranks: Sequence[RankInfo] = (),
    ) -> None:
        self._link = link
        self._own = own
        self._ranks = ranks
        self._counters = counters
        self._retry_after = retry_after
        self._peers: dict[EngineId, Peer] = {}
        self._by_conn: dict[ConnId, Peer] = {}  # those that are met, or being met
        self._refused: dict[EngineId, Peer] = {}
        # that were met once, and did not answer; oldest first
        self._silent: dict[EngineId, None] = {}
        self._look_at = inf  # when the first of the refused may be forgotten

    def __len__(self) -> int:
        return len(self._peers)

    def ensure_connected(
        self, engine: EngineId, address: Address, *, now: float, is_offer: bool = False
    ) -> Peer:
        """Return the peer; connect if it is new, its pause is over, or its address has changed.

        An offer ends the pause of an unreachable peer: it has computed a prompt since, so it lives.
        """
        peer = self._peers.get(engine)
        if peer is None:
            peer = Peer(engine, address, self._link.connect(address, engine), tried_at=now)
            peer.is_doubted = engine in self._silent
            self._peers[engine] = self._by_conn[peer.conn] = peer
        elif peer.state is PeerState.REFUSED and self._may_retry(
            peer, address, now, is_offer=is_offer
        ):
            peer.on(PeerEvent.RETRIED)
            del self._refused[engine]
            peer.is_doubted = not peer.is_incompatible
            peer.tried_at = now
            peer.is_incompatible = peer.is_final = peer.has_ended = False
            peer.address = address
            peer.conn = self._link.connect(address, engine)
            self._by_conn[peer.conn] = peer
        return peer

    @staticmethod
    def _may_retry(peer: Peer, address: Address, now: float, *, is_offer: bool) -> bool:
        return (
            now >= peer.retry_at
            or address != peer.address
            or (is_offer and not peer.is_incompatible)
        )

    def get(self, engine: EngineId) -> Peer | None:
        """Return a peer that is known, in whatever state."""
        return self._peers.get(engine)

    def find(self, conn: ConnId) -> Peer | None:
        """Return the peer behind a connection."""
        return self._by_conn.get(conn)

    def on(self, event: LinkEvent, *, now: float) -> Peer | None:
        """Handle an event of a connection that we opened; return the peer whose state changed."""
        peer = self.find(event.conn)
        match event:
            case PeerConnected(conn, welcome, is_elsewhere) if peer is not None:
                peer.is_elsewhere = is_elsewhere
                if reason := self._imposture(peer, welcome):
                    self._link.close(conn)
                    peer.is_incompatible = peer.is_final = peer.has_ended = True
                    peer.cause = "version" if welcome.protocol != PROTOCOL else "refused"
                    self.refuse(peer, reason, now=now)
                elif reason := mismatch(self._own, welcome.fingerprint) or self._difference(
                    welcome
                ):
                    peer.on(PeerEvent.DIFFERS)
                    peer.reason = printable(reason)
                    peer.is_incompatible = True
                    peer.is_final = True
                    peer.cause = self._cause_of_difference(welcome)
                    self._counters.count("handshakes_failed")
                else:
                    peer.on(PeerEvent.CONNECTED)
                    peer.welcome = welcome
                    peer.last_heard_at = now
                    peer.is_doubted = False
                    self._silent.pop(peer.engine, None)
                    self._counters.count("handshakes")
            case ConnectFailed(_, reason, is_incompatible, has_ended, cause) if peer is not None:
                peer.is_incompatible = is_incompatible
                peer.has_ended = has_ended
                peer.cause = cause or ("refused" if is_incompatible else UNREACHABLE)
                self.refuse(peer, reason, now=now)
            case ConnectionLost(_, reason, is_silent, is_reset) if peer is not None:
                self._forget(peer)
                peer.reason = reason
                peer.is_silent = is_silent
                peer.is_reset = is_reset
                peer.on(PeerEvent.DISCONNECTED)
                if is_silent:
                    self._doubt(peer)
                self._counters.count("peers_lost")
            case _:
                return None
        return peer

    def refuse(self, peer: Peer, reason: str, *, now: float) -> None:
        """Refuse a peer for a pause that doubles with every consecutive failure."""
        peer.on(PeerEvent.REFUSED)
        peer.reason = printable(reason)
        peer.welcome = None
        peer.retry_at = now + min(MAX_BACKOFF, self._retry_after * 2 ** min(peer.failures, 16))
        peer.failures += 1
        self._by_conn.pop(peer.conn, None)
        self._refused[peer.engine] = peer
        self._look_at = min(self._look_at, peer.retry_at + MAX_BACKOFF)
        self._counters.count("handshakes_failed")

    def disconnect(self, peer: Peer, reason: str) -> None:
        """Close the connection to a peer that does not answer; the next request connects again."""
        self._forget(peer)
        peer.reason = reason
        self._link.close(peer.conn)
        peer.on(PeerEvent.DISCONNECTED)
        self._doubt(peer)
        self._counters.count("peers_lost")

    def _doubt(self, peer: Peer) -> None:
        """Doubt a peer that did not answer: the next request waits less for its handshake."""
        self._silent[peer.engine] = None
        if len(self._silent) > MAX_SILENT:
            del self._silent[next(iter(self._silent))]

    def forget_refused(self, needed: Iterable[EngineId], *, now: float) -> None:
        """Forget refused peers that no request needs, long after their pause."""
        if now < self._look_at:
            return
        keep = set(needed)
        for peer in list(self._refused.values()):
            if peer.engine not in keep and now >= peer.retry_at + MAX_BACKOFF:
                self._forget(peer)
                peer.on(PeerEvent.DISCONNECTED)
        self._look_at = min(
            (peer.retry_at + MAX_BACKOFF for peer in self._refused.values()), default=inf
        )

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.engine]
        self._by_conn.pop(peer.conn, None)
        self._refused.pop(peer.engine, None)

    def _imposture(self, peer: Peer, welcome: Welcome) -> str | None:
        if welcome.protocol != PROTOCOL:
            return f"it speaks protocol {welcome.protocol}, we speak {PROTOCOL}"
        if welcome.engine != peer.engine:
            return f"engine {welcome.engine} answers at {peer.address} now, the request was prefilled by {peer.engine}"
        return None

    def _cause_of_difference(self, welcome: Welcome) -> str:
        if welcome.fingerprint.vllm != self._own.vllm:
            return "version"
        return "model" if mismatch(self._own, welcome.fingerprint) is not None else "refused"

    def _difference(self, welcome: Welcome) -> str | None:
        return difference(self._ranks, welcome.ranks) if self._ranks else None


_OF_THE_MODEL: Final = ("config", "tokenizer", "weights")  # digests
_OF_SCHEDULERS: Final = ("draft_model", *_OF_THE_MODEL)


def mismatch(ours: Fingerprint, theirs: Fingerprint) -> str | None:
    """Name the first thing in which two engines differ with both values, or return None."""
    for name in Fingerprint.__struct_fields__:
        our = getattr(ours, name)
        their = getattr(theirs, name)
        if our == their or (name in _OF_SCHEDULERS and not our):
            continue
        if name in _OF_THE_MODEL:
            verb, others = ("are", "ours are") if name == "weights" else ("is", "ours is")
            return (
                f"it serves another model, or another revision of it: its {name} {verb} {their!r}, "
                f"{others} {our!r}; they must be equal"
            )
        return f"its {name.replace('_', ' ')} is {their!r}, ours is {our!r}; they must be equal"
    return None
