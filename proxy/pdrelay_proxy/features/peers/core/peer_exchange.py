"""One router's side of what the routers of a fleet tell each other: who is there, and three
payloads.

A datagram of this module's own kind names the routers that its sender hears: its body is (router 8)
* n.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from pdrelay_proxy.features.peers.core.datagrams import (
    NAME_BYTES,
    DatagramFault,
    DatagramKind,
    Envelope,
    Opened,
)
from pdrelay_proxy.features.peers.core.peer_table import PeerTable

INTRODUCTIONS: Final = DatagramKind(b"xpI1", NAME_BYTES)


class Payload(Protocol):
    """What follows from one kind of datagrams. Routers are named by 8 bytes."""

    def receive(self, heard: Opened, /, *, now: float) -> DatagramFault | None:
        """Take in what an introduced router says; return why some of it was dropped, or None."""
        ...

    def expire(
        self, departed: Sequence[bytes], forgotten: Sequence[bytes], /, *, now: float
    ) -> None:
        """Drop what was not repeated.

        ``departed``: routers that are silent now, for they are cut off or have ended;
        ``forgotten``: those that have been so for so long that they begin anew if they come back.
        """
        ...


class PeerExchange:
    """Opens and makes datagrams.

    ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970.
    """

    def __init__(self, me: bytes, secret: bytes, payloads: Mapping[DatagramKind, Payload]) -> None:
        """``me``: 8 random bytes, others for each start of the process."""
        self._envelope = Envelope(me, secret, (INTRODUCTIONS, *payloads))
        self._payloads = payloads
        self._peers = PeerTable()
        self.hears_itself = False  # it is among those that it sends to

    @property
    def peers(self) -> int:
        """How many other routers count."""
        return self._peers.introduced

    @property
    def has_news(self) -> bool:
        """Tell whether a router is heard that no introduction of this one has named yet."""
        return self._peers.has_news

    def introduction(self, *, wall: float) -> bytes:
        """Return a datagram that names the routers that are heard."""
        return self._envelope.seal(INTRODUCTIONS, b"".join(self._peers.present()), wall)

    def sealed(
        self, kind: DatagramKind, bodies: Sequence[bytes], *, wall: float
    ) -> Sequence[bytes]:
        """Return a datagram for each body."""
        return [self._envelope.seal(kind, body, wall) for body in bodies]

    def receive(self, data: bytes, *, now: float, wall: float) -> DatagramFault | None:
        """Take in a datagram; return why it was dropped, or None.

        One's own datagrams say nothing.
        """
        opened = self._envelope.open(data, wall)
        if isinstance(opened, DatagramFault):
            return opened
        router = opened.router
        if router == self._envelope.me:
            self.hears_itself = True
            return None
        fault = self._peers.hear(router, opened.kind, opened.sequence, now=now)
        if fault is not None:
            return fault
        payload = self._payloads.get(opened.kind)
        if payload is None:
            names = opened.body
            if self._envelope.me in [
                names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)
            ]:
                self._peers.introduce(router)
            return None
        if not self._peers.is_introduced(router):
            return DatagramFault.UNKNOWN
        return payload.receive(opened, now=now)

    def expire(self, *, now: float) -> int:
        """Drop what was not repeated, and return how many routers are silent since the last
        time.
        """
        before = self.peers
        departed, forgotten = self._peers.expire(now=now)
        for payload in self._payloads.values():
            payload.expire(departed, forgotten, now=now)
        return before - self.peers
