"""How long a prefill engine (P) keeps the KV blocks of a finished request.

P grants a lease when the request finishes. The first decode engine that renews it owns it from then
on, and the lease also ends when that engine's connection closes. P may revoke a lease that nothing
reads. Every call costs O(log n), or as much as the number of requests it names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple, TypeAlias

from pdrelay_connector.core.deadlines import Deadlines
from pdrelay_connector.core.ids import ConnId, RequestId
from pdrelay_connector.core.messages import MAX_IDS
from pdrelay_connector.core.state_machine import transition
from pdrelay_connector.errors import IllegalTransition


class LeaseState(Enum):
    """State of a lease."""

    GRANTED = auto()  # no decode engine has renewed it yet
    CLAIMED = auto()  # a decode engine renews it
    OVER = auto()


class LeaseEvent(Enum):
    """What can happen to a lease. All but RENEWED end it."""

    RENEWED = auto()
    DONE = auto()  # every decode rank has read its part
    DROPPED = auto()  # the decode engine does not want the blocks
    PEER_LOST = auto()  # the connection of the decode engine that claimed it closed
    EXPIRED = auto()  # it was not renewed in time
    REVOKED = auto()  # P needed its blocks for a prefill


TRANSITIONS: Final[Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]]] = {
    LeaseState.GRANTED: {
        LeaseEvent.RENEWED: LeaseState.CLAIMED,
        LeaseEvent.DONE: LeaseState.OVER,
        LeaseEvent.DROPPED: LeaseState.OVER,
        LeaseEvent.EXPIRED: LeaseState.OVER,
        LeaseEvent.REVOKED: LeaseState.OVER,
    },
    LeaseState.CLAIMED: {
        LeaseEvent.RENEWED: LeaseState.CLAIMED,
        LeaseEvent.DONE: LeaseState.OVER,
        LeaseEvent.DROPPED: LeaseState.OVER,
        LeaseEvent.PEER_LOST: LeaseState.OVER,
        LeaseEvent.EXPIRED: LeaseState.OVER,
        LeaseEvent.REVOKED: LeaseState.OVER,
    },
    LeaseState.OVER: {},
}

_READ: Final = (LeaseEvent.DONE, LeaseEvent.DROPPED)  # these ends say that nothing is read any more


class LeaseEnded(NamedTuple):
    """A lease has ended: its blocks may be freed."""

    request: RequestId
    reason: LeaseEvent

    @property
    def text(self) -> str:
        """What peers are told of it."""
        return f"its lease is over ({self.reason.name.lower().replace('_', ' ')})"


# Whether two connections are of one engine, as far as both have proven who they are. A decode
# engine has several: its scheduler renews, its workers say what they have read.
SameEngine: TypeAlias = Callable[[ConnId, ConnId], bool]


@dataclass(slots=True)
class _Lease:
    expires_at: float
    state: LeaseState = LeaseState.GRANTED
    holder: ConnId | None = None
    read_until: float = -inf  # a decode engine may read until then
    # by reader
    ranks_done: dict[RequestId, set[int]] = field(default_factory=dict[RequestId, set[int]])

    def on(self, event: LeaseEvent) -> None:
        self.state = transition(TRANSITIONS, self.state, event, "a lease")


class LeaseTable:
    """All leases of one engine. Time (seconds, monotonic) only enters through ``now`` arguments.

    ``reading`` is how long (s) a lease is kept after a decode engine began to read. Without
    ``same_engine`` no connection is known to be of the same engine as another: then only the
    connection that claimed a lease may renew it, and any may say that it has read it or does not
    want it.
    """

    def __init__(
        self,
        *,
        duration: float,
        extension: float,
        reading: float = 30.0,
        same_engine: SameEngine | None = None,
    ) -> None:
        self._duration = duration
        self._extension = extension
        self._reading = reading
        self._same_engine = same_engine
        self._leases: dict[RequestId, _Lease] = {}
        self._deadlines: Deadlines[RequestId] = Deadlines()
        # a dict, because it keeps their order
        self._by_holder: dict[ConnId, dict[RequestId, None]] = {}
        # of leases that ended while they were read
        self._late_reads: Deadlines[RequestId] = Deadlines()
        # of those: the ranks that have read their part
        self._late_ranks: dict[RequestId, set[int]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._leases

    @property
    def requests(self) -> list[RequestId]:
        """The requests whose blocks are held, oldest first."""
        return list(self._leases)

    def grant(self, request: RequestId, *, now: float) -> None:
        """Start holding the blocks of a request."""
        if request in self._leases:
            raise IllegalTransition(f"request {request} was granted a lease twice")
        lease = self._leases[request] = _Lease(now + self._duration)
        self._deadlines.set(request, lease.expires_at)

    def renew(self, request: RequestId, holder: ConnId, *, now: float) -> bool:
        """Apply a heartbeat; false: there is no such lease, or another engine holds it.

        It can only lengthen a lease. An engine that has connected again takes its leases over. A
        lease that is due, but not expired yet, is renewed: its blocks are still held, and if we
        handle a punctual heartbeat late (a starved thread, a stopped process), that is not the
        decode engine's fault.
        """
        lease = self._leases.get(request)
        if lease is None:
            return False
        if lease.holder is not None and not self.is_same(lease.holder, holder):
            return False
        lease.on(LeaseEvent.RENEWED)
        if lease.holder != holder:
            self._unhold(request, lease)
            lease.holder = holder
            self._by_holder.setdefault(holder, {})[request] = None
        lease.expires_at = max(lease.expires_at, now + self._extension)
        self._deadlines.set(request, lease.expires_at)
        return True

    def holder(self, request: RequestId) -> ConnId | None:
        """Return the connection that renews a lease; None if it is unclaimed or over."""
        lease = self._leases.get(request)
        return lease.holder if lease is not None else None

    def is_same(self, holder: ConnId, conn: ConnId) -> bool:
        """Whether a connection may renew the leases of another one: both are of one engine."""
        return holder == conn or (self._same_engine is not None and self._same_engine(holder, conn))

    def may_end(self, request: RequestId, conn: ConnId) -> bool:
        """Whether a connection is of the engine that holds a lease, as far as that can be known."""
        holder = self.holder(request)
        return holder is None or self._same_engine is None or self.is_same(holder, conn)

    def read(self, request: RequestId, *, now: float) -> None:
        """Note that a decode engine reads the blocks now: the lease is not revoked meanwhile."""
        self._leases[request].read_until = now + self._reading

    def is_read(self, request: RequestId, *, now: float) -> bool:
        """Whether a decode engine reads the blocks of a lease, as far as we know."""
        return now < self._leases[request].read_until

    def done(
        self, request: RequestId, reader: RequestId, rank: int, ranks: int
    ) -> LeaseEnded | None:
        """Record that one of a reader's ranks has read its part; the last one ends the lease.

        Several readers may share a lease (one prompt, n answers): ranks of two of them do not add
        up to one.
        """
        by_reader = self._leases[request].ranks_done
        if reader not in by_reader and len(by_reader) >= MAX_IDS:
            return None  # no prompt has so many readers; the lease ends another way
        by_reader.setdefault(reader, set()).add(rank)
        return self.end(request, LeaseEvent.DONE) if len(by_reader[reader]) >= ranks else None

    def lose(self, holder: ConnId) -> list[LeaseEnded]:
        """End every lease claimed over a connection that closed."""
        return [
            self.end(request, LeaseEvent.PEER_LOST)
            for request in list(self._by_holder.get(holder, ()))
        ]

    def has_late_reads(self, *, now: float) -> bool:
        """Whether a decode engine may still read blocks after their lease: memory must stay."""
        self._forget_late_reads(now)
        return bool(self._late_ranks)

    def _forget_late_reads(self, now: float) -> None:
        """Forget ended leases whose readers have given up by now."""
        for request in self._late_reads.take_due(now=now):
            del self._late_ranks[request]

    def late_read_ended(self, request: RequestId, rank: int = 0, ranks: int = 1) -> None:
        """Record that a rank no longer reads the blocks of a lease that is over."""
        if (done := self._late_ranks.get(request)) is None:
            return
        done.add(rank)
        if len(done) >= ranks:
            del self._late_ranks[request]
            self._late_reads.discard(request)

    def expire(self, *, now: float) -> list[LeaseEnded]:
        """End the leases that were not renewed in time."""
        self._forget_late_reads(now)
        return [
            self.end(request, LeaseEvent.EXPIRED) for request in self._deadlines.take_due(now=now)
        ]

    def next_expiry(self) -> float | None:
        """Return when the first lease expires unless renewed; None when there is none."""
        return self._deadlines.next()

    def end(self, request: RequestId, reason: LeaseEvent) -> LeaseEnded:
        """End a lease."""
        lease = self._leases.pop(request)
        lease.on(reason)
        self._unhold(request, lease)
        self._deadlines.discard(request)
        if reason not in _READ and lease.read_until > -inf:
            self._late_reads.set(request, lease.read_until)
            self._late_ranks[request] = set()
        return LeaseEnded(request, reason)

    def _unhold(self, request: RequestId, lease: _Lease) -> None:
        if lease.holder is None:
            return
        leases = self._by_holder[lease.holder]
        del leases[request]
        if not leases:
            del self._by_holder[lease.holder]
