"""One router's side of the exchange between the routers of a fleet: introductions and payloads.

An introduction names the routers that its sender hears: its body is (router 8) * n.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from pdrelay_proxy.features.peers.core.datagrams import (
    NAME_BYTES,
    Datagram,
    DatagramFault,
    DatagramKind,
    Envelope,
)
from pdrelay_proxy.features.peers.core.peer_table import PeerTable

INTRODUCTIONS: Final = DatagramKind(b"xpI1", NAME_BYTES)


class Payload(Protocol):
    """Handles one kind of datagrams. Routers are named by 8 bytes."""

    def receive(self, datagram: Datagram, /, *, now: float) -> DatagramFault | None:
        """Handle a datagram of an introduced router; return why a part was dropped, or None."""
        ...

    def expire(
        self, departed: Sequence[bytes], forgotten: Sequence[bytes], /, *, now: float
    ) -> None:
        """Drop entries that were not repeated.

        ``departed``: routers that became silent, because they are cut off or have ended;
        ``forgotten``: routers that were silent for so long that they begin anew if they return.
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
        self.hears_itself = False  # its own address is among those that it sends to

    @property
    def peers(self) -> int:
        """How many other routers are introduced."""
        return self._peers.introduced

    @property
    def has_news(self) -> bool:
        """Whether a router is heard that no introduction has named yet."""
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
        """Handle a datagram; return why it was dropped, or None.

        Datagrams of this router itself are ignored.
        """
        datagram = self._envelope.open(data, wall)
        if isinstance(datagram, DatagramFault):
            return datagram
        router = datagram.router
        if router == self._envelope.me:
            self.hears_itself = True
            return None
        fault = self._peers.hear(router, datagram.kind, datagram.sequence, now=now)
        if fault is not None:
            return fault
        payload = self._payloads.get(datagram.kind)
        if payload is None:
            names = datagram.body
            if self._envelope.me in [
                names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)
            ]:
                self._peers.introduce(router)
            return None
        if not self._peers.is_introduced(router):
            return DatagramFault.UNKNOWN
        return payload.receive(datagram, now=now)

    def expire(self, *, now: float) -> int:
        """Drop what was not repeated; return how many routers became silent since the last call."""
        before = self.peers
        departed, forgotten = self._peers.expire(now=now)
        for payload in self._payloads.values():
            payload.expire(departed, forgotten, now=now)
        return before - self.peers
