"""Which other routers are there: the life of each, by its datagrams.

Whoever reads the network can repeat a datagram while its time is good. So a datagram that is not
newer than those before it is late. A router that is silent is remembered for as long as one of its
datagrams may be good: until ``SKEW_S`` after it was sent, twice that by a clock that is ahead.

A router that has just started cannot know which datagrams are old. So routers tell each other whom
they hear, and what a router says counts once it has named this one: a router draws its name at its
start, so it did so later than that.
"""

from collections.abc import Mapping
from enum import auto
from typing import Final

from pdrelay_proxy.core.fast_enum import FastStrEnum
from pdrelay_proxy.features.peers.core.datagrams import (
    MOST_PEERS,
    SKEW_S,
    DatagramFault,
    DatagramKind,
)

# Seconds without a datagram until a router counts as departed: each repeats itself every second.
PATIENCE_S: Final = 3.0
_KEPT_S: Final = 2 * SKEW_S
_MOST_DEPARTED: Final = 1024  # of more those are forgotten that went first


class PeerState(FastStrEnum):
    """Where another router stands."""

    HEARD = auto()  # it has not named this router
    INTRODUCED = auto()  # it has, so what it says counts
    DEPARTED = auto()  # it is silent
    FORGOTTEN = auto()  # all its datagrams are too old


class PeerEvent(FastStrEnum):
    """What happens to it."""

    SPEAK = auto()  # a datagram that is newer than those before it
    NAME_US = auto()
    FALL_SILENT = auto()
    FORGET = auto()


TRANSITIONS: Final[Mapping[PeerState, Mapping[PeerEvent, PeerState]]] = {
    PeerState.HEARD: {
        PeerEvent.SPEAK: PeerState.HEARD,
        PeerEvent.NAME_US: PeerState.INTRODUCED,
        PeerEvent.FALL_SILENT: PeerState.DEPARTED,
    },
    PeerState.INTRODUCED: {
        PeerEvent.SPEAK: PeerState.INTRODUCED,
        PeerEvent.NAME_US: PeerState.INTRODUCED,
        PeerEvent.FALL_SILENT: PeerState.DEPARTED,
    },
    PeerState.DEPARTED: {
        PeerEvent.SPEAK: PeerState.HEARD,
        PeerEvent.FORGET: PeerState.FORGOTTEN,
    },
    PeerState.FORGOTTEN: {},
}
_DEPARTED: Final = PeerState.DEPARTED  # looking a member up takes as long as a call
_INTRODUCED: Final = PeerState.INTRODUCED


class _Peer:
    """One other router."""

    __slots__ = ("at", "sequences", "state")

    def __init__(self) -> None:
        self.state = PeerState.HEARD
        self.at = 0.0  # when its latest datagram came, or it departed
        self.sequences: dict[bytes, int] = {}  # the highest, by the code of the kind

    def on(self, event: PeerEvent) -> None:
        """Take a step; one that is not in the table is a bug."""
        self.state = TRANSITIONS[self.state][event]

    def is_silent(self, now: float) -> bool:
        """Tell whether it departs."""
        return self.state is not _DEPARTED and now > self.at + PATIENCE_S


class PeerTable:
    """All other routers. ``now``: seconds of a clock that only rises."""

    def __init__(self) -> None:
        # those that have departed in the order of their departure
        self._peers: dict[bytes, _Peer] = {}
        self.has_news = False  # a router speaks that ``present`` has not shown yet

    @property
    def introduced(self) -> int:
        """How many routers count."""
        return sum([peer.state is _INTRODUCED for peer in self._peers.values()])

    def present(self) -> list[bytes]:
        """Return the routers that are heard."""
        self.has_news = False
        return [router for router, peer in self._peers.items() if peer.state is not _DEPARTED]

    def hear(
        self, router: bytes, kind: DatagramKind, sequence: int, *, now: float
    ) -> DatagramFault | None:
        """Note a datagram; return why it is dropped, whatever it says, or None."""
        peer = self._peers.get(router) or _Peer()
        if sequence <= peer.sequences.get(kind.code, 0):
            return DatagramFault.LATE
        if router not in self._peers or peer.state is _DEPARTED:
            if sum([one.state is not _DEPARTED for one in self._peers.values()]) >= MOST_PEERS:
                return DatagramFault.TOO_MANY
            self._peers[router] = peer
            self.has_news = True
        peer.sequences[kind.code] = sequence
        peer.at = now
        peer.on(PeerEvent.SPEAK)
        return None

    def is_introduced(self, router: bytes) -> bool:
        """Tell whether what a router says counts."""
        peer = self._peers.get(router)
        return peer is not None and peer.state is _INTRODUCED

    def introduce(self, router: bytes) -> None:
        """A router that was heard just now has named this one."""
        self._peers[router].on(PeerEvent.NAME_US)

    def expire(self, *, now: float) -> tuple[list[bytes], list[bytes]]:
        """Return the routers that have departed since the last time, and those that are
        forgotten.
        """
        silent = [router for router in self._peers if self._peers[router].is_silent(now)]
        for router in silent:
            peer = self._peers[router] = self._peers.pop(router)
            peer.on(PeerEvent.FALL_SILENT)
            peer.at = now
        departed = [router for router, peer in self._peers.items() if peer.state is _DEPARTED]
        kept = departed[-_MOST_DEPARTED:]
        old = departed[:-_MOST_DEPARTED] + [
            router for router in kept if now > self._peers[router].at + _KEPT_S
        ]
        for router in old:
            self._peers.pop(router).on(PeerEvent.FORGET)
        return silent, old
