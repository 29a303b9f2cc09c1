"""How long a prefill engine keeps the KV blocks of a request it finished.

A lease is granted when the request finishes. A decode engine claims it with its first
renewal; from then on it also ends when that engine's connection closes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from xpyd_connector.core.ids import ConnId, RequestId
from xpyd_connector.core.lives import follow
from xpyd_connector.core.messages import MAX_IDS
from xpyd_connector.errors import IllegalTransition


class LeaseState(Enum):
    """Where a lease is in its life."""

    GRANTED = auto()  # nobody has asked for the blocks yet
    CLAIMED = auto()  # a decode engine renews it
    OVER = auto()


class LeaseEvent(Enum):
    """What can happen to a lease. All but RENEWED end it."""

    RENEWED = auto()
    DONE = auto()  # every decode rank has read its part
    DROPPED = auto()  # the decode engine does not want the blocks
    PEER_LOST = auto()  # the connection of the decode engine that claimed it closed
    EXPIRED = auto()  # nobody renewed it in time


TRANSITIONS: Final[Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]]] = {
    LeaseState.GRANTED: {
        LeaseEvent.RENEWED: LeaseState.CLAIMED,
        LeaseEvent.DONE: LeaseState.OVER,
        LeaseEvent.DROPPED: LeaseState.OVER,
        LeaseEvent.EXPIRED: LeaseState.OVER,
    },
    LeaseState.CLAIMED: {
        LeaseEvent.RENEWED: LeaseState.CLAIMED,
        LeaseEvent.DONE: LeaseState.OVER,
        LeaseEvent.DROPPED: LeaseState.OVER,
        LeaseEvent.PEER_LOST: LeaseState.OVER,
        LeaseEvent.EXPIRED: LeaseState.OVER,
    },
    LeaseState.OVER: {},
}


class Released(NamedTuple):
    """A lease ended: its blocks may be freed."""

    request: RequestId
    why: LeaseEvent


@dataclass(slots=True)
class _Lease:
    expires_at: float
    state: LeaseState = LeaseState.GRANTED
    holder: ConnId | None = None
    ranks_done: dict[RequestId, set[int]] = field(default_factory=dict[RequestId, set[int]])  # by reader

    def on(self, event: LeaseEvent) -> None:
        self.state = follow(TRANSITIONS, self.state, event, "a lease")


class LeaseBook:
    """All leases of one engine. Time (seconds, monotonic) only enters through ``now`` arguments."""

    def __init__(self, *, duration: float, extension: float) -> None:
        self._duration = duration
        self._extension = extension
        self._leases: dict[RequestId, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._leases

    def grant(self, request: RequestId, *, now: float) -> None:
        """Start holding the blocks of a request."""
        if request in self._leases:
            raise IllegalTransition(f"request {request} was granted a lease twice")
        self._leases[request] = _Lease(now + self._duration)

    def renew(self, request: RequestId, holder: ConnId, *, now: float) -> bool:
        """Apply a heartbeat; false if there is no such lease. It can only lengthen a lease, never shorten one."""
        lease = self._leases.get(request)
        if lease is None or lease.expires_at <= now:
            return False  # one that is due is expired by the next expire(): a late renewal must not revive it
        lease.on(LeaseEvent.RENEWED)
        lease.holder = holder
        lease.expires_at = max(lease.expires_at, now + self._extension)
        return True

    def done(self, request: RequestId, reader: RequestId, rank: int, ranks: int) -> Released | None:
        """Record that one of a reader's ranks has read its part; the last one ends the lease.

        Several readers may share a lease (one prompt, n answers): ranks of two of them do not add up to one.
        """
        by_reader = self._leases[request].ranks_done
        if reader not in by_reader and len(by_reader) >= MAX_IDS:
            return None  # nobody has so many; the lease ends some other way
        by_reader.setdefault(reader, set()).add(rank)
        return self._end(request, LeaseEvent.DONE) if len(by_reader[reader]) >= ranks else None

    def finish(self, request: RequestId) -> Released:
        """End a lease because everything was written to everybody who asked for it."""
        return self._end(request, LeaseEvent.DONE)

    def drop(self, request: RequestId) -> Released:
        """End a lease because the decode engine does not want the blocks."""
        return self._end(request, LeaseEvent.DROPPED)

    def lose(self, holder: ConnId) -> list[Released]:
        """End every lease claimed over a connection that closed."""
        return self._end_all((r for r, lease in self._leases.items() if lease.holder == holder), LeaseEvent.PEER_LOST)

    def expire(self, *, now: float) -> list[Released]:
        """End the leases that nobody renewed in time."""
        # Renewals move deadlines around, so the dict is not in deadline order: look at all of them.
        late = (r for r, lease in self._leases.items() if lease.expires_at <= now)
        return self._end_all(late, LeaseEvent.EXPIRED)

    def next_expiry(self) -> float | None:
        """When the first lease ends if nobody renews it; None when there is none."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def _end_all(self, requests: Iterable[RequestId], why: LeaseEvent) -> list[Released]:
        return [self._end(request, why) for request in list(requests)]

    def _end(self, request: RequestId, why: LeaseEvent) -> Released:
        self._leases.pop(request).on(why)
        return Released(request, why)
