"""What the routers of a fleet tell each other: how many requests each of them has at each engine, in datagrams.

A count is absolute and replaces the one before, so a lost or repeated datagram does no harm for long: each router
repeats all counts above 0 every second, and what is not repeated for three seconds counts no more. Engines are named by
role, address and rank, because each router has ids of its own.

    magic 4 | router 8 | sequence 8 | seconds since 1970, 8 | (engine 8, requests 2) * n | tag 16

The tag is a keyed hash (BLAKE2b) of the rest, with the fleet's secret.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from typing import Final

from xpyd_proxy.core.fleet.load import Load
from xpyd_proxy.core.fleet.registry import Member, Registry
from xpyd_proxy.core.model import InstanceId

MOST_BYTES: Final = 1200  # of a datagram: less than any MTU
MOST_PEERS: Final = 128
_MAGIC: Final = b"xpL1"
_HEAD: Final = Struct(">4s8sQd")
_ENTRY: Final = Struct(">8sH")
_TAG: Final = 16  # bytes
_ENTRIES: Final = (MOST_BYTES - _HEAD.size - _TAG) // _ENTRY.size
_MOST_ENGINES: Final = 16_384  # that one peer may name
_MOST_COUNT: Final = 65_535
_DATAGRAMS_PER_S: Final = 3000.0  # that one router sends; 2 to 3 % of a core
_BURST_S: Final = 0.25  # seconds' worth of those that may go out in a row
_REPEAT_S: Final = 1.0
_PATIENCE_S: Final = 3.0
_SKEW_S: Final = 30.0  # how far the clocks of two hosts may differ
_REORDERED: Final = 16  # datagrams that may overtake one


class DatagramFault(StrEnum):
    """Why a datagram was dropped."""

    MALFORMED = "malformed"
    TAG = "tag"  # it was made with another secret
    CLOCK = "clock"  # it is old, or the clocks of the hosts differ
    LATE = "late"  # newer ones came before it
    TOO_MANY = "too_many"  # routers, or engines of one of them


@dataclass(slots=True)
class _Count:
    """What one router has at one engine."""

    requests: int
    sequence: int
    at: float


@dataclass(slots=True)
class _Peer:
    """One other router."""

    heard: float
    sequence: int = 0  # the highest
    counts: dict[bytes, _Count] = field(default_factory=dict[bytes, _Count])


class SendPace:
    """When the others are told: at once, while this router sends less than ``_DATAGRAMS_PER_S`` on the mean."""

    def __init__(self) -> None:
        self._paid_at = 0.0  # when what was sent would be sent at the mean rate

    def due(self, *, now: float) -> float:
        """Return when the next datagrams may go out."""
        return max(now, self._paid_at - _BURST_S)

    def sent(self, targets: int, *, now: float) -> None:
        """A datagram went to so many routers."""
        self._paid_at = max(now, self._paid_at) + targets / _DATAGRAMS_PER_S


class LoadExchange:
    """One router's side. ``now`` is seconds of a clock that only rises, ``wall`` seconds since 1970."""

    def __init__(self, registry: Registry, me: bytes, secret: bytes) -> None:
        """``me``: 8 random bytes, others for each start of the process."""
        self._registry = registry
        self._me = me
        self._secret = blake2b(secret).digest()  # a key of BLAKE2b has at most 64 bytes
        self._changed: dict[InstanceId, None] = {}
        self._sequence = 0
        self._repeat_at = 0.0
        self._names: dict[InstanceId, bytes] = {}
        self._loads: dict[bytes, Load] = {}  # by the name of the engine
        self._seen = -1  # registry.changes of these
        self._peers: dict[bytes, _Peer] = {}

    @property
    def peers(self) -> int:
        """How many other routers are heard."""
        return len(self._peers)

    def note(self, instance: InstanceId) -> None:
        """The number of this router's requests at an engine changes."""
        self._changed[instance] = None

    def datagrams(self, *, now: float, wall: float) -> Sequence[bytes]:
        """Return what the others have to be told: what has changed, or once a second everything."""
        repeats = now >= self._repeat_at
        if repeats:
            self._repeat_at = now + _REPEAT_S
            members: Sequence[Member] = self._registry.members()
        else:
            found = [self._registry.get(name) for name in self._changed]
            members = [member for member in found if member is not None]
        changed, self._changed = self._changed, {}
        self._follow()
        entries = [
            _ENTRY.pack(self._names[member.instance.id], min(member.load.own, _MOST_COUNT))
            for member in members
            if member.load.own or member.instance.id in changed
        ]
        starts = range(0, len(entries), _ENTRIES)
        parts = [entries[start : start + _ENTRIES] for start in starts] or ([[]] if repeats else [])
        return [self._datagram(part, wall) for part in parts]

    def receive(self, data: bytes, *, now: float, wall: float) -> DatagramFault | None:
        """Take in what another router says; say why it was dropped, or None. One's own datagrams say nothing."""
        size = len(data) - _HEAD.size - _TAG
        if len(data) > MOST_BYTES or size < 0 or size % _ENTRY.size or not data.startswith(_MAGIC):
            return DatagramFault.MALFORMED
        if not compare_digest(self._tag(data[:-_TAG]), data[-_TAG:]):
            return DatagramFault.TAG
        _, router, sequence, sent = _HEAD.unpack_from(data)
        if router == self._me:
            return None
        if not abs(wall - sent) <= _SKEW_S:
            return DatagramFault.CLOCK
        peer = self._peers.get(router)
        if peer is None:
            if len(self._peers) >= MOST_PEERS:
                return DatagramFault.TOO_MANY
            peer = self._peers[router] = _Peer(now)
        elif sequence + _REORDERED < peer.sequence:
            return DatagramFault.LATE
        peer.heard, peer.sequence = now, max(peer.sequence, sequence)
        self._follow()
        for engine, requests in _ENTRY.iter_unpack(data[_HEAD.size : -_TAG]):
            if not self._count(peer, engine, requests, sequence, now):
                return DatagramFault.TOO_MANY
        return None

    def expire(self, *, now: float) -> int:
        """Drop what was not repeated, and return how many routers are silent since the last time."""
        silent = [router for router, peer in self._peers.items() if now > peer.heard + _PATIENCE_S]
        for router in silent:
            del self._peers[router]
        for peer in self._peers.values():
            for engine in [one for one, count in peer.counts.items() if now > count.at + _PATIENCE_S]:
                del peer.counts[engine]
        self._seen = -1
        self._follow()
        return len(silent)

    def _count(self, peer: _Peer, engine: bytes, requests: int, sequence: int, now: float) -> bool:
        """Take in one count; False: there are too many."""
        known, load = peer.counts.get(engine), self._loads.get(engine)
        before = 0
        if known is None:
            if len(peer.counts) >= _MOST_ENGINES:
                return False
            peer.counts[engine] = _Count(requests, sequence, now)
        elif sequence <= known.sequence:
            return True
        else:
            before = known.requests
            known.requests, known.sequence, known.at = requests, sequence, now
        if load is not None:
            load.at_peers += requests - before
        return True

    def _follow(self) -> None:
        """Go by the engines that there are now."""
        changes = self._registry.changes.count
        if changes == self._seen:
            return
        self._seen = changes
        members, before = self._registry.members(), self._names
        self._names = {one.instance.id: before.get(one.instance.id) or _name(one) for one in members}
        self._loads = {self._names[one.instance.id]: one.load for one in members}
        for engine, load in self._loads.items():
            counts = [peer.counts.get(engine) for peer in self._peers.values()]
            load.at_peers = sum([count.requests for count in counts if count is not None])

    def _datagram(self, entries: Sequence[bytes], wall: float) -> bytes:
        self._sequence += 1
        text = b"".join((_HEAD.pack(_MAGIC, self._me, self._sequence, wall), *entries))
        return text + self._tag(text)

    def _tag(self, text: bytes) -> bytes:
        return blake2b(text, key=self._secret, digest_size=_TAG).digest()


def _name(member: Member) -> bytes:
    """Return what all routers call an engine."""
    instance = member.instance
    text = f"{instance.role} {instance.address.authority} {instance.rank}"
    return blake2b(text.encode(), digest_size=8).digest()
