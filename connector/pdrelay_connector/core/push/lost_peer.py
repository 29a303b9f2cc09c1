"""A prefill engine (P) whose connection has ended while it may still write into our blocks.

They stay unused until all that P had sent must have arrived. P has died if it has closed the
connection. If the connection was reset, there are three possible causes: P has died; P lives, but
was cut off for so long that its kernel gave up; or a device on the way has reset it. D connects to
P's address, at once and again until it knows: P has died if its port is closed or another engine
listens there. The time of P's last answer proves nothing, because D itself may have been stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_connector.core.deadlines import Deadlines
from pdrelay_connector.core.ids import Address, RequestId
from pdrelay_connector.core.messages import RankInfo
from pdrelay_connector.core.session.peers import Peer, PeerState, PeerTable

# (s between looks, looks). Not a span of time: a process that was stopped meanwhile must run for a
# while before what lies in its sockets has been taken in.
# P's scheduler is dead, its workers follow, and what is left is in our sockets
LOCAL_QUARANTINE: Final = 0.1, 50
# The same on another machine: what P had sent into a cut, its kernel sends again for 102 s (Linux,
# tcp_orphan_retries: 200 ms, doubled eight times). Measured: 11 s after the end of P, when a cut of
# 14 s had just mended.
QUARANTINE: Final = 2.0, 60
# cut off: TCP sends again for 15 minutes (Linux, tcp_retries2) once the cut mends
LONG_QUARANTINE: Final = 10.0, 110


@dataclass(slots=True)
class LostPeer:
    """P, as it was when its connection ended, and how often we look until its bytes are here."""

    peer: Peer
    address: Address  # where the request said that it is
    ranks: Sequence[RankInfo]  # another process has others, also under the same engine id
    is_silent: bool  # it has not closed its connection: we ask whether it lives
    is_reset: bool  # nor has the network cut it: a closed port shows that it has died
    check_interval: float = 0.0  # s
    checks: int = 0  # that are left

    @classmethod
    def of(cls, peer: Peer, address: Address) -> "LostPeer":
        """Begin when the connection has ended."""
        lost = cls(peer, address, peer.ranks, peer.is_silent, peer.is_reset)
        if lost.is_silent:
            lost.check_interval, lost.checks = LONG_QUARANTINE
        else:
            lost.has_died()
        return lost

    def has_died(self) -> None:
        """Outlast what a dead P had sent."""
        self.is_silent = self.is_reset = False
        looks = QUARANTINE if self.peer.is_elsewhere else LOCAL_QUARANTINE
        self.check_interval, self.checks = looks

    def is_back(self, peer: Peer) -> bool:
        """Whether that process is connected again: it alone knows whether its workers write."""
        return peer.engine == self.peer.engine and peer.ranks == self.ranks

    def is_dead_by(self, peer: Peer) -> bool:
        """Whether what is at its address now, or that nothing is, shows that it has died.

        P itself, if it answers, is asked instead: another process may have its engine id.
        """
        answers = peer.state in (PeerState.CONNECTED, PeerState.INCOMPATIBLE)
        has_ended = peer.has_ended and peer.engine == self.peer.engine
        return self.is_reset and self.address == peer.address and (answers or has_ended)


class LostPeers:
    """The quarantined pushes, each with its P."""

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._lost: dict[RequestId, LostPeer] = {}
        self._looks: Deadlines[RequestId] = Deadlines()

    def add(self, request: RequestId, peer: Peer, address: Address, *, now: float) -> None:
        """The connection of a push's P has ended."""
        lost = self._lost[request] = LostPeer.of(peer, address)
        self._look_later(request, lost, now)

    def take_back(self, peer: Peer) -> list[RequestId]:
        """Return the pushes of a P that is connected again, which ends their quarantine."""
        requests = [request for request, lost in self._lost.items() if lost.is_back(peer)]
        for request in requests:
            self.discard(request)
        return requests

    def peer_changed(self, peer: Peer, *, now: float) -> None:
        """Check whether an answer, or none, proves that a P has died whose connection was reset."""
        for request, lost in self._lost.items():
            if lost.is_dead_by(peer):
                lost.has_died()
                self._looks.set(request, now + lost.check_interval)

    def take_over(self, *, now: float) -> list[RequestId]:
        """Return the pushes of which all that P had sent must have arrived."""
        over: list[RequestId] = []
        for request in self._looks.take_due(now=now):
            lost = self._lost[request]
            lost.checks -= 1
            if lost.checks > 0:
                self._look_later(request, lost, now)
            else:
                self.discard(request)
                over.append(request)
        return over

    def next(self) -> float | None:
        """Return when to look next."""
        return self._looks.next()

    def discard(self, request: RequestId) -> None:
        """Forget a push, if it is quarantined."""
        self._lost.pop(request, None)
        self._looks.discard(request)

    def _look_later(self, request: RequestId, lost: LostPeer, now: float) -> None:
        self._looks.set(request, now + lost.check_interval)
        if lost.is_silent:
            self._peers.ensure_connected(lost.peer.engine, lost.address, now=now)
