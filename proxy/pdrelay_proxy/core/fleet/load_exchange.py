"""What the routers of a fleet tell each other: how many requests each of them has at each engine, in datagrams.

A count is absolute and replaces the one before, so a lost or repeated datagram does no harm for long: each router tells
a change once more with the next one, and repeats all counts above 0 every second; what is not repeated for three
seconds counts no more. Engines are named by role, address and rank, because each router has ids of its own. The body of
a datagram is (engine 8, requests 2) * n.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import Final

from pdrelay_proxy.core.departed_routers import DepartedRouters
from pdrelay_proxy.core.fleet.load import Load
from pdrelay_proxy.core.fleet.registry import Member, Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.peer_datagrams import MOST_BODY, MOST_PEERS, NAME_BYTES, Admits, DatagramFault, Envelope

LOADS: Final = b"xpL1"  # the kind of these datagrams
_ENTRY: Final = Struct(">8sH")
_ENTRIES: Final = MOST_BODY // _ENTRY.size  # of one datagram
_MOST_ENGINES: Final = 16_384  # that one peer may name
_MOST_COUNT: Final = 65_535
_DATAGRAMS_PER_S: Final = 3000.0  # that one router sends; 2 to 3 % of a core
_BURST_S: Final = 0.25  # seconds' worth of those that may go out in a row
_REPEAT_S: Final = 1.0
_PATIENCE_S: Final = 3.0
_REORDERED: Final = 16  # datagrams that may overtake one


@dataclass(slots=True)
class _LoadCount:
    """What one router has at one engine."""

    requests: int
    sequence: int
    at: float


@dataclass(slots=True)
class _LoadPeer:
    """One other router."""

    heard: float
    sequence: int = 0  # the highest
    expired: int = 0  # the highest of what is too old to count: nothing up to it is taken in again
    counts: dict[bytes, _LoadCount] = field(default_factory=dict[bytes, _LoadCount])


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

    def __init__(self, registry: Registry, me: bytes, secret: bytes, introductions: Admits) -> None:
        """``me``: 8 random bytes, others for each start of the process."""
        self._registry = registry
        self._introductions = introductions
        self._envelope = Envelope(LOADS, me, secret, _ENTRY.size)
        self.hears_itself = False  # it is among those that it sends to
        self._changed: dict[InstanceId, None] = {}
        self._told: dict[InstanceId, None] = {}  # what had changed when the others were told last
        self._repeat_at = 0.0
        self._names: dict[InstanceId, bytes] = {}
        self._loads: dict[bytes, Load] = {}  # by the name of the engine
        self._seen = -1  # registry.changes of these
        self._peers: dict[bytes, _LoadPeer] = {}
        self._departed = DepartedRouters()

    @property
    def peers(self) -> int:
        """How many other routers are heard."""
        return len(self._peers)

    def note(self, instance: InstanceId) -> None:
        """The number of this router's requests at an engine changes."""
        self._changed[instance] = None

    def datagrams(self, *, now: float, wall: float) -> Sequence[bytes]:
        """Return what the others have to be told: what has changed, or once a second everything.

        What was told last is told again where there is room: a count that is lost makes a busy engine look free.
        """
        changed, self._changed = self._changed, {}
        told, self._told = self._told, changed
        if changed and told and len(changed) + len(told) <= _ENTRIES:
            changed = changed | told
        repeats = now >= self._repeat_at
        if repeats:
            self._repeat_at = now + _REPEAT_S
            changed = changed or told
            members: Sequence[Member] = self._registry.members()
        else:
            found = [self._registry.get(name) for name in changed]
            members = [member for member in found if member is not None]
        self._follow()
        entries = [
            _ENTRY.pack(self._names[member.instance.id], min(member.load.in_flight, _MOST_COUNT))
            for member in members
            if member.load.in_flight or member.instance.id in changed
        ]
        if repeats and not entries:
            return [self._envelope.seal(b"", wall)]
        return self._envelope.sealed(entries, wall)

    def receive(self, data: bytes, *, now: float, wall: float) -> DatagramFault | None:
        """Take in what another router says; say why it was dropped, or None. One's own datagrams say nothing."""
        opened = self._envelope.open_admitted(data, self._introductions, now=now, wall=wall)
        if opened is None:
            self.hears_itself = True
            return None
        if isinstance(opened, DatagramFault):
            return opened
        sequence = opened.sequence
        peer = self._peer(opened.router, sequence, now)
        if isinstance(peer, DatagramFault):
            return peer
        peer.heard, peer.sequence = now, max(peer.sequence, sequence)
        self._follow()
        for engine, requests in _ENTRY.iter_unpack(opened.body):
            if not self._count(peer, engine, requests, sequence, now):
                return DatagramFault.TOO_MANY
        return None

    def expire(self, *, now: float) -> int:
        """Drop what was not repeated, and return how many routers are silent since the last time."""
        silent = [router for router, peer in self._peers.items() if now > peer.heard + _PATIENCE_S]
        for router in silent:
            self._departed.add(router, self._peers.pop(router).sequence, now=now)
        self._departed.expire(now=now)
        for peer in self._peers.values():
            for engine in [one for one, count in peer.counts.items() if now > count.at + _PATIENCE_S]:
                peer.expired = max(peer.expired, peer.counts.pop(engine).sequence)
        self._seen = -1
        self._follow()
        return len(silent)

    def _peer(self, router: bytes, sequence: int, now: float) -> _LoadPeer | DatagramFault:
        """Return who sent a datagram, or why it is dropped: somebody repeats it, or there are too many routers."""
        peer = self._peers.get(router)
        if peer is not None:
            is_late = sequence <= peer.expired or sequence + _REORDERED < peer.sequence
            return DatagramFault.LATE if is_late else peer
        before = self._departed.sequence(router)
        if sequence <= before:
            return DatagramFault.LATE
        if len(self._peers) >= MOST_PEERS:
            return DatagramFault.TOO_MANY
        self._departed.remove(router)
        peer = self._peers[router] = _LoadPeer(now, before, before)
        return peer

    def _count(self, peer: _LoadPeer, engine: bytes, requests: int, sequence: int, now: float) -> bool:
        """Take in one count; False: there are too many."""
        known, load = peer.counts.get(engine), self._loads.get(engine)
        before = 0
        if known is None:
            if len(peer.counts) >= _MOST_ENGINES:
                return False
            peer.counts[engine] = _LoadCount(requests, sequence, now)
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
        self._names = {one.instance.id: before.get(one.instance.id) or engine_name(one) for one in members}
        self._loads = {self._names[one.instance.id]: one.load for one in members}
        for engine, load in self._loads.items():
            counts = [peer.counts.get(engine) for peer in self._peers.values()]
            load.at_peers = sum([count.requests for count in counts if count is not None])


def engine_name(member: Member) -> bytes:
    """Return what all routers call an engine."""
    instance = member.instance
    text = f"{instance.pool} {instance.address.authority} {instance.rank}"
    return blake2b(text.encode(), digest_size=NAME_BYTES).digest()
