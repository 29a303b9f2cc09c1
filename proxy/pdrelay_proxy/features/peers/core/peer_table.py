"""The other routers: the life of each, by its datagrams.

An attacker on the network can replay a datagram while its time is valid. So a datagram must be
newer than those before it. A silent router is remembered for as long as its datagrams may be valid:
until ``SKEW_S`` after they were sent, or twice that if its clock is ahead.

A router that has just started cannot know which datagrams are old. So routers introduce themselves
with the names of the routers that they hear, and a router's datagrams count once it has named this
one: the name was drawn at this router's start, so that datagram is newer.
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
_MOST_DEPARTED: Final = 1024  # of more, those that departed first are forgotten


class PeerState(FastStrEnum):
    """The state of another router."""

    HEARD = auto()  # it has not named this router
    INTRODUCED = auto()  # it has named this router, so its datagrams count
    DEPARTED = auto()  # it is silent
    FORGOTTEN = auto()  # all its datagrams are too old


class PeerEvent(FastStrEnum):
    """An event in its life."""

    SPEAK = auto()  # a datagram newer than those before it
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
_DEPARTED: Final = PeerState.DEPARTED
_INTRODUCED: Final = PeerState.INTRODUCED


class _Peer:
    """One other router."""

    __slots__ = ("at", "sequences", "state")

    def __init__(self) -> None:
        self.state = PeerState.HEARD
        self.at = 0.0  # when its latest datagram came, or it departed
        self.sequences: dict[bytes, int] = {}  # the highest, by the code of the kind

    def on(self, event: PeerEvent) -> None:
        """Make a transition; one that is not in the table is a bug."""
        self.state = TRANSITIONS[self.state][event]

    def is_silent(self, now: float) -> bool:
        """Tell whether it must depart now."""
        return self.state is not _DEPARTED and now > self.at + PATIENCE_S


class PeerTable:
    """All other routers. ``now``: seconds of a clock that only rises."""

    def __init__(self) -> None:
        # departed ones in the order of their departure
        self._peers: dict[bytes, _Peer] = {}
        self.has_news = False  # a router is heard that ``present`` has not returned yet

    @property
    def introduced(self) -> int:
        """How many routers are introduced."""
        return sum([peer.state is _INTRODUCED for peer in self._peers.values()])

    def present(self) -> list[bytes]:
        """Return the routers that are not silent."""
        self.has_news = False
        return [router for router, peer in self._peers.items() if peer.state is not _DEPARTED]

    def hear(
        self, router: bytes, kind: DatagramKind, sequence: int, *, now: float
    ) -> DatagramFault | None:
        """Note a datagram of any kind; return why it must be dropped, or None."""
        peer = self._peers.get(router) or _Peer()
        if sequence <= peer.sequences.get(kind.code, 0):
            return DatagramFault.LATE
        if router not in self._peers or peer.state is _DEPARTED:
            if (
                sum([other_peer.state is not _DEPARTED for other_peer in self._peers.values()])
                >= MOST_PEERS
            ):
                return DatagramFault.TOO_MANY
            self._peers[router] = peer
            self.has_news = True
        peer.sequences[kind.code] = sequence
        peer.at = now
        peer.on(PeerEvent.SPEAK)
        return None

    def is_introduced(self, router: bytes) -> bool:
        """Tell whether a router's datagrams count."""
        peer = self._peers.get(router)
        return peer is not None and peer.state is _INTRODUCED

    def introduce(self, router: bytes) -> None:
        """Note that a router, heard just now, has named this one."""
        self._peers[router].on(PeerEvent.NAME_US)

    def expire(self, *, now: float) -> tuple[list[bytes], list[bytes]]:
        """Return the routers that departed since the last call, and those that are forgotten."""
        silent = [router for router in self._peers if self._peers[router].is_silent(now)]
        for router in silent:
            peer = self._peers[router] = self._peers.pop(router)
            peer.on(PeerEvent.FALL_SILENT)
            peer.at = now
        departed = [router for router, peer in self._peers.items() if peer.state is _DEPARTED]
        remembered = departed[-_MOST_DEPARTED:]
        old = departed[:-_MOST_DEPARTED] + [
            router for router in remembered if now > self._peers[router].at + _KEPT_S
        ]
        for router in old:
            self._peers.pop(router).on(PeerEvent.FORGET)
        return silent, old
