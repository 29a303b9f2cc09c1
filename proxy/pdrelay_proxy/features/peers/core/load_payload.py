"""How many requests each router of a fleet has at each engine.

A count is absolute and replaces the one before, so a lost or repeated datagram does no harm for
long: each router sends a change twice, and repeats all counts above 0 every second; a count that is
not repeated for three seconds expires. Engines are named by role, address and rank, because each
router has its own ids. The body of a datagram is (engine 8, requests 2) * n.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from struct import Struct
from typing import Final

from pdrelay_proxy.core.fleet.load import Load
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.peers.core.datagrams import (
    MOST_BODY,
    NAME_BYTES,
    Datagram,
    DatagramFault,
    DatagramKind,
    bodies_of,
)
from pdrelay_proxy.features.peers.core.peer_table import PATIENCE_S

_ENTRY: Final = Struct(">8sH")
_ENTRIES: Final = MOST_BODY // _ENTRY.size  # of one datagram
LOADS: Final = DatagramKind(b"xpL1", _ENTRY.size)
_MOST_ENGINES: Final = 16_384  # of one peer
_MOST_COUNT: Final = 65_535
_DATAGRAMS_PER_S: Final = 3000.0  # of one router, on average; 2 to 3 % of a core
_BURST_S: Final = 0.25  # datagrams of so many seconds may be sent at once
_REPEAT_S: Final = 1.0
_NO_COUNT: Final = 0, 0.0


class SendPace:
    """Limits the rate: datagrams go out at once, below ``_DATAGRAMS_PER_S`` on average."""

    def __init__(self) -> None:
        self._paid_at = 0.0  # the time at which the average rate allows all that was sent

    def due(self, *, now: float) -> float:
        """Return when the next datagrams may go out."""
        return max(now, self._paid_at - _BURST_S)

    def note_sent(self, datagrams: int, *, now: float) -> None:
        """So many went out; what follows waits no longer than until all is repeated in any case."""
        paid_at = max(now, self._paid_at) + datagrams / _DATAGRAMS_PER_S
        self._paid_at = min(paid_at, now + _REPEAT_S)


class LoadPayload:
    """One router's side. ``now`` is seconds of a clock that only rises."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._changed: dict[InstanceId, None] = {}
        self._latest_changes: dict[InstanceId, None] = {}  # sent last
        self._repeat_at = 0.0
        self._names: dict[InstanceId, bytes] = {}
        self._loads: dict[bytes, Load] = {}  # by the name of the engine
        self._lineup = -1  # registry.lineup of the names and loads
        # by router and engine: requests, and since when; of each router the oldest first
        self._peers: dict[bytes, dict[bytes, tuple[int, float]]] = {}

    def note(self, instance: InstanceId) -> None:
        """The number of this router's requests at an engine changes."""
        self._changed[instance] = None

    def bodies(self, *, now: float) -> Sequence[bytes]:
        """Return the bodies to send: the changes, or once a second all counts.

        The latest changes are repeated if there is room: a lost count makes a busy engine look
        free.
        """
        changed = self._changed
        latest = self._latest_changes
        self._changed = {}
        self._latest_changes = changed
        if changed and latest and len(changed) + len(latest) <= _ENTRIES:
            changed = changed | latest
        repeats = now >= self._repeat_at
        if repeats:
            self._repeat_at = now + _REPEAT_S
            changed = changed or latest
            members: Sequence[Member] = self._registry.members()
        else:
            changed_members = [self._registry.get(name) for name in changed]
            members = [member for member in changed_members if member is not None]
        self._follow()
        entries = [
            _ENTRY.pack(self._names[member.instance.id], min(member.load.in_flight, _MOST_COUNT))
            for member in members
            if member.load.in_flight or member.instance.id in changed
        ]
        return [b""] if repeats and not entries else bodies_of(entries)

    def receive(self, datagram: Datagram, /, *, now: float) -> DatagramFault | None:
        """Apply the counts of another router; return why some were dropped, or None."""
        counts = self._peers.setdefault(datagram.router, {})
        self._follow()
        for engine, requests in _ENTRY.iter_unpack(datagram.body):
            before = counts.pop(engine, None)
            if before is None and len(counts) >= _MOST_ENGINES:
                return DatagramFault.TOO_MANY
            counts[engine] = requests, now
            self._add(engine, requests if before is None else requests - before[0])
        return None

    def expire(
        self,
        departed: Sequence[bytes],
        forgotten: Sequence[bytes],  # noqa: ARG002
        /,
        *,
        now: float,
    ) -> None:
        """Drop counts that were not repeated."""
        for router in departed:
            for engine, (requests, _) in self._peers.pop(router, {}).items():
                self._add(engine, -requests)
        for counts in self._peers.values():
            late = list(takewhile(lambda count: now > count[1][1] + PATIENCE_S, counts.items()))
            for engine, (requests, _) in late:
                del counts[engine]
                self._add(engine, -requests)
        self._follow()

    def _add(self, engine: bytes, requests: int) -> None:
        if (load := self._loads.get(engine)) is not None:
            load.at_other_routers += requests

    def _follow(self) -> None:
        """Update names and loads after a change of the registry."""
        lineup = self._registry.lineup.count
        if lineup == self._lineup:
            return
        self._lineup = lineup
        members = self._registry.members()
        before = self._names
        self._names = {
            member.instance.id: before.get(member.instance.id) or engine_name(member)
            for member in members
        }
        known = self._loads
        self._loads = {self._names[member.instance.id]: member.load for member in members}
        for engine, load in self._loads.items():
            if known.get(engine) is not load:
                load.at_other_routers = sum(
                    [counts.get(engine, _NO_COUNT)[0] for counts in self._peers.values()]
                )


def engine_name(member: Member) -> bytes:
    """Return the name of an engine that is the same at all routers."""
    instance = member.instance
    text = f"{instance.pool} {instance.address.authority} {instance.rank}"
    return blake2b(text.encode(), digest_size=NAME_BYTES).digest()
