"""The envelope of what the routers of a fleet tell each other in datagrams.

    kind 4 | router 8 | sequence 8 | seconds since 1970, 8 | body | tag 16

The tag is a keyed hash (BLAKE2b) of the rest, with the fleet's secret. A router has another name with each start, and
numbers its datagrams of each kind.
"""

from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from typing import Final, Protocol

MOST_BYTES: Final = 1200  # of a datagram: less than any MTU
MOST_PEERS: Final = 128
NAME_BYTES: Final = 8  # of a router, and of what it tells of
_HEAD: Final = Struct(">4s8sQd")
_TAG: Final = 16  # bytes
MOST_BODY: Final = MOST_BYTES - _HEAD.size - _TAG
SKEW_S: Final = 30.0  # how far the clocks of two hosts may differ


class DatagramFault(StrEnum):
    """Why a datagram was dropped."""

    MALFORMED = "malformed"
    TAG = "tag"  # it was made with another secret
    CLOCK = "clock"  # it is old, or the clocks of the hosts differ
    LATE = "late"  # newer ones came before it
    UNKNOWN = "unknown"  # its router has not named this one yet: core/peer_introductions.py
    TOO_MANY = "too_many"  # routers, or what one of them tells of


class Opened:
    """A datagram that was made with the secret."""

    __slots__ = ("body", "router", "sequence")

    def __init__(self, router: bytes, sequence: int, body: bytes) -> None:
        self.router = router
        self.sequence = sequence
        self.body = body


class Admits(Protocol):
    """Knows which routers are there."""

    def admits(self, router: bytes, /, *, now: float) -> bool:
        """Tell whether what has come from a router just now is to be taken in."""
        ...


class Envelope:
    """Makes and opens datagrams of one kind. ``wall``: seconds since 1970."""

    def __init__(self, kind: bytes, me: bytes, secret: bytes, entry: int) -> None:
        """``kind``: 4 bytes; ``me``: 8 random bytes; ``entry``: bytes of each of the entries that are a body."""
        self.me = me
        self._kind = kind
        self._key = blake2b(secret).digest()  # a key of BLAKE2b has at most 64 bytes
        self._entry = entry
        self._sequence = 0

    def sealed(self, entries: list[bytes], wall: float) -> list[bytes]:
        """Return datagrams with these entries; none makes none."""
        size = MOST_BODY // self._entry
        return [self.seal(b"".join(entries[at : at + size]), wall) for at in range(0, len(entries), size)]

    def seal(self, body: bytes, wall: float) -> bytes:
        """Return a datagram."""
        self._sequence += 1
        text = _HEAD.pack(self._kind, self.me, self._sequence, wall) + body
        return text + self._tag(text)

    def open(self, data: bytes, wall: float) -> Opened | DatagramFault:
        """Return what is in a datagram, or why it is dropped."""
        size = len(data) - _HEAD.size - _TAG
        if len(data) > MOST_BYTES or size < 0 or size % self._entry or not data.startswith(self._kind):
            return DatagramFault.MALFORMED
        if not compare_digest(self._tag(data[:-_TAG]), data[-_TAG:]):
            return DatagramFault.TAG
        _, router, sequence, sent = _HEAD.unpack_from(data)
        if not abs(wall - sent) <= SKEW_S:
            return DatagramFault.CLOCK
        return Opened(router, sequence, data[_HEAD.size : -_TAG])

    def open_admitted(
        self, data: bytes, routers: Admits, /, *, now: float, wall: float
    ) -> Opened | DatagramFault | None:
        """Return the same of a router that is there; None: this one has sent it. ``now``: of a rising clock."""
        opened = self.open(data, wall)
        if isinstance(opened, DatagramFault):
            return opened
        if opened.router == self.me:
            return None
        return opened if routers.admits(opened.router, now=now) else DatagramFault.UNKNOWN

    def _tag(self, text: bytes) -> bytes:
        return blake2b(text, key=self._key, digest_size=_TAG).digest()
