"""Which other routers are there now: those that have named this process in a datagram of their own.

Whoever reads the network can repeat what a router has sent before, for as long as its time is good
(``peer_datagrams.SKEW_S``), and a router that has just started cannot know that it is old. So routers tell each other
whom they hear. A router draws its name at its start, so a datagram that has the name was sent later than that.

The body of a datagram is (router 8) * n.
"""

from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.peer_datagrams import MOST_PEERS, NAME_BYTES, DatagramFault, Envelope

INTRODUCTIONS: Final = b"xpI1"  # the kind of these datagrams
_SILENT_S: Final = 3.0  # seconds without a datagram, after which a router has to name this one again


@dataclass(slots=True)
class _HeardRouter:
    """One other router."""

    at: float  # when its latest datagram came
    has_named_us: bool = False


class PeerIntroductions:
    """One router's side. ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970."""

    def __init__(self, me: bytes, secret: bytes) -> None:
        """``me``: 8 random bytes, others for each start of the process."""
        self._envelope = Envelope(INTRODUCTIONS, me, secret, NAME_BYTES)
        self._heard: dict[bytes, _HeardRouter] = {}
        self.has_news = False  # a router was heard that no datagram of this one has named yet

    def datagram(self, *, wall: float) -> bytes:
        """Return what the others have to be told: whom this router hears."""
        self.has_news = False
        return self._envelope.seal(b"".join(self._heard), wall)

    def receive(self, data: bytes, *, now: float, wall: float) -> DatagramFault | None:
        """Take in whom another router hears; say why a datagram was dropped, or None."""
        opened = self._envelope.open(data, wall)
        if isinstance(opened, DatagramFault):
            return opened
        if opened.router == self._envelope.me:
            return None
        router, names = self._hear(opened.router, now), opened.body
        if router is None:
            return DatagramFault.TOO_MANY
        if self._envelope.me in [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]:
            router.has_named_us = True
        return None

    def admits(self, router: bytes, /, *, now: float) -> bool:
        """Tell whether a router, from which something has come just now, has named this one."""
        found = self._hear(router, now)
        return found is not None and found.has_named_us

    def expire(self, *, now: float) -> None:
        """Forget routers that are silent."""
        for router in [router for router, one in self._heard.items() if now > one.at + _SILENT_S]:
            del self._heard[router]

    def _hear(self, router: bytes, now: float) -> _HeardRouter | None:
        """Note that a router has sent something; None: there are too many."""
        found = self._heard.get(router)
        if found is None:
            if len(self._heard) >= MOST_PEERS:
                return None
            found = self._heard[router] = _HeardRouter(now)
            self.has_news = True
        found.at = now
        return found
