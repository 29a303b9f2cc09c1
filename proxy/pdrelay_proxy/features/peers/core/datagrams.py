"""The envelope of the datagrams between the routers of a fleet.

    kind 4 | router 8 | sequence 8 | seconds since 1970, 8 | body | tag 16

The tag is a keyed hash of the rest (BLAKE2b, RFC 7693) with the fleet's secret. A router draws a
new name at each start, and numbers its datagrams of each kind. A body has entries of one size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from typing import Final

MOST_BYTES: Final = 1200  # of a datagram: less than any MTU
MOST_PEERS: Final = 128
NAME_BYTES: Final = 8  # of routers, engines and keys
_HEAD: Final = Struct(">4s8sQd")
_TAG: Final = 16  # bytes
MOST_BODY: Final = MOST_BYTES - _HEAD.size - _TAG
SKEW_S: Final = 30.0  # how far the clocks of two hosts may differ


class DatagramFault(StrEnum):
    """Why a datagram was dropped."""

    MALFORMED = "malformed"
    TAG = "tag"  # it has another secret
    CLOCK = "clock"  # it is old, or the clocks of the hosts differ
    LATE = "late"  # a newer one came before it
    UNKNOWN = "unknown"  # its router has not named this one yet (peer_table.py)
    TOO_MANY = "too_many"  # routers, or entries of one router


@dataclass(frozen=True, slots=True)
class DatagramKind:
    """One kind of datagrams."""

    code: bytes  # 4 bytes
    entry_bytes: int


class Datagram:
    """The content of a datagram with a valid tag."""

    __slots__ = ("body", "kind", "router", "sequence")

    def __init__(self, kind: DatagramKind, router: bytes, sequence: int, body: bytes) -> None:
        self.kind = kind
        self.router = router
        self.sequence = sequence
        self.body = body


class Envelope:
    """Makes and opens the datagrams of one router. ``wall``: seconds since 1970."""

    def __init__(self, me: bytes, secret: bytes, kinds: Sequence[DatagramKind]) -> None:
        """``me``: 8 random bytes."""
        self.me = me
        self._key = blake2b(secret).digest()  # a key of BLAKE2b has at most 64 bytes
        self._kinds: Mapping[bytes, DatagramKind] = {kind.code: kind for kind in kinds}
        self._sequences = {kind.code: 0 for kind in kinds}

    def seal(self, kind: DatagramKind, body: bytes, wall: float) -> bytes:
        """Return a datagram with the next sequence number, and its tag."""
        self._sequences[kind.code] += 1
        text = _HEAD.pack(kind.code, self.me, self._sequences[kind.code], wall) + body
        return text + self._tag(text)

    def open(self, data: bytes, wall: float) -> Datagram | DatagramFault:
        """Return the content of a datagram, or why it is dropped."""
        kind = self._kinds.get(data[:4])
        size = len(data) - _HEAD.size - _TAG
        if kind is None or len(data) > MOST_BYTES or size < 0 or size % kind.entry_bytes:
            return DatagramFault.MALFORMED
        if not compare_digest(self._tag(data[:-_TAG]), data[-_TAG:]):
            return DatagramFault.TAG
        _, router, sequence, sent_at = _HEAD.unpack_from(data)
        if not abs(wall - sent_at) <= SKEW_S:
            return DatagramFault.CLOCK
        return Datagram(kind, router, sequence, data[_HEAD.size : -_TAG])

    def _tag(self, text: bytes) -> bytes:
        return blake2b(text, key=self._key, digest_size=_TAG).digest()


def bodies_of(entries: Sequence[bytes]) -> list[bytes]:
    """Pack entries of one size into the bodies of as few datagrams as possible."""
    if not entries:
        return []
    at_once = MOST_BODY // len(entries[0])
    return [b"".join(entries[at : at + at_once]) for at in range(0, len(entries), at_once)]
