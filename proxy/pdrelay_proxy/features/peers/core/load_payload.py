"""How many requests each router of a fleet has at each engine.

A count is absolute and replaces the one before, so a lost or repeated datagram does no harm for
long: each router tells a change once more with the next one, and repeats all counts above 0 every
second; what is not repeated for three seconds counts no more. Engines are named by role, address
and rank, because each router has ids of its own. The body of a datagram is (engine 8, requests 2) *
n.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import Final

from pdrelay_proxy.core.fleet.load import Load
from pdrelay_proxy.core.fleet.member import Member
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.features.peers.core.datagrams import (
    MOST_BODY,
    NAME_BYTES,
    DatagramFault,
    DatagramKind,
    Opened,
    bodies_of,
)
from pdrelay_proxy.features.peers.core.peer_table import PATIENCE_S

_ENTRY: Final = Struct(">8sH")
_ENTRIES: Final = MOST_BODY // _ENTRY.size  # of one datagram
LOADS: Final = DatagramKind(b"xpL1", _ENTRY.size)
_MOST_ENGINES: Final = 16_384  # that one peer may name
_MOST_COUNT: Final = 65_535
_DATAGRAMS_PER_S: Final = 3000.0  # that one router sends; 2 to 3 % of a core
_BURST_S: Final = 0.25  # seconds' worth of those that may go out in a row
_REPEAT_S: Final = 1.0
_NO_COUNT: Final = 0, 0.0


class SendPace:
    """When the others are told: at once, while this router sends less than ``_DATAGRAMS_PER_S`` on
    the mean.
    """

    def __init__(self) -> None:
        self._paid_at = 0.0  # when what was sent would be sent at the mean rate

    def due(self, *, now: float) -> float:
        """Return when the next datagrams may go out."""
        return max(now, self._paid_at - _BURST_S)

    def sent(self, targets: int, *, now: float) -> None:
        """A datagram went to so many routers."""
        self._paid_at = max(now, self._paid_at) + targets / _DATAGRAMS_PER_S


class LoadPayload:
    """One router's side. ``now`` is seconds of a clock that only rises."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._changed: dict[InstanceId, None] = {}
        self._told: dict[InstanceId, None] = {}  # the changes that the others were told of last
        self._repeat_at = 0.0
        self._names: dict[InstanceId, bytes] = {}
        self._loads: dict[bytes, Load] = {}  # by the name of the engine
        self._seen = -1  # registry.changes of these
        # by router and engine: requests, and since when
        self._peers: dict[bytes, dict[bytes, tuple[int, float]]] = {}

    def note(self, instance: InstanceId) -> None:
        """The number of this router's requests at an engine changes."""
        self._changed[instance] = None

    def bodies(self, *, now: float) -> Sequence[bytes]:
        """Return what the others have to be told: the changes, or once a second everything.

        The latest changes are told again where there is room: a count that is lost makes a busy
        engine look free.
        """
        changed = self._changed
        told = self._told
        self._changed = {}
        self._told = changed
        if changed and told and len(changed) + len(told) <= _ENTRIES:
            changed = changed | told
        repeats = now >= self._repeat_at
        if repeats:
            self._repeat_at = now + _REPEAT_S
            changed = changed or told
            members: Sequence[Member] = self._registry.members()
        else:
            known = [self._registry.get(name) for name in changed]
            members = [member for member in known if member is not None]
        self._follow()
        entries = [
            _ENTRY.pack(self._names[member.instance.id], min(member.load.in_flight, _MOST_COUNT))
            for member in members
            if member.load.in_flight or member.instance.id in changed
        ]
        return [b""] if repeats and not entries else bodies_of(entries)

    def receive(self, heard: Opened, /, *, now: float) -> DatagramFault | None:
        """Take in the counts of another router; return why some were dropped, or None."""
        counts = self._peers.setdefault(heard.router, {})
        self._follow()
        for engine, requests in _ENTRY.iter_unpack(heard.body):
            if engine not in counts and len(counts) >= _MOST_ENGINES:
                return DatagramFault.TOO_MANY
            if (load := self._loads.get(engine)) is not None:
                load.at_other_routers += requests - counts.get(engine, _NO_COUNT)[0]
            counts[engine] = requests, now
        return None

    def expire(
        self,
        departed: Sequence[bytes],
        forgotten: Sequence[bytes],  # noqa: ARG002
        /,
        *,
        now: float,
    ) -> None:
        """Drop what was not repeated."""
        for router in departed:
            self._peers.pop(router, None)
        for counts in self._peers.values():
            for engine in [engine for engine, (_, at) in counts.items() if now > at + PATIENCE_S]:
                del counts[engine]
        self._seen = -1
        self._follow()

    def _follow(self) -> None:
        """Go by the engines that there are now."""
        changes = self._registry.changes.count
        if changes == self._seen:
            return
        self._seen = changes
        members = self._registry.members()
        before = self._names
        self._names = {
            one.instance.id: before.get(one.instance.id) or engine_name(one) for one in members
        }
        self._loads = {self._names[one.instance.id]: one.load for one in members}
        for engine, load in self._loads.items():
            load.at_other_routers = sum(
                [counts.get(engine, _NO_COUNT)[0] for counts in self._peers.values()]
            )


def engine_name(member: Member) -> bytes:
    """Return the name by which all routers call an engine."""
    instance = member.instance
    text = f"{instance.pool} {instance.address.authority} {instance.rank}"
    return blake2b(text.encode(), digest_size=NAME_BYTES).digest()
