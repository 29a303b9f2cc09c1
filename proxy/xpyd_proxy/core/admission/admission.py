"""Who is served now, who waits and who is refused: one ticket for each request, one table for its life.

A request that is over a limit of its key is refused at the door, so that those who wait do so for one thing only: a
place among the requests that are served. They get one by priority and, within a priority, in the order they came. When
the queue is full, one of a lower priority has to give way, of the same key or of one that has more than its share of
the queue; so overload ends in refusals and never in a longer queue.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import auto
from math import ceil
from typing import Final

from xpyd_proxy.core.admission.limits import Limit, Refusal, TokenBucket
from xpyd_proxy.core.fast_enum import FastStrEnum
from xpyd_proxy.settings import Settings

_SOON: Final = 1  # seconds; a place of one's own is free as soon as one's own request has ended
_LATER: Final = 5  # seconds; nobody knows when a crowd has passed


class TicketState(FastStrEnum):
    """Where a request stands."""

    ARRIVING = auto()
    WAITING = auto()
    ADMITTED = auto()
    REFUSED = auto()  # at the door, or later for one that is more important
    EXPIRED = auto()  # it has waited too long
    LEFT = auto()  # it is over, or its client did not want to wait


_ARRIVING: Final = TicketState.ARRIVING  # looking a member up takes as long as a call
_ADMITTED: Final = TicketState.ADMITTED


class TicketEvent(FastStrEnum):
    """What happens to it."""

    ADMIT = auto()
    WAIT = auto()
    REFUSE = auto()
    EXPIRE = auto()
    LEAVE = auto()


_ADMIT: Final = TicketEvent.ADMIT
_LEAVE: Final = TicketEvent.LEAVE
TRANSITIONS: Final[Mapping[TicketState, Mapping[TicketEvent, TicketState]]] = {
    TicketState.ARRIVING: {
        TicketEvent.ADMIT: TicketState.ADMITTED,
        TicketEvent.WAIT: TicketState.WAITING,
        TicketEvent.REFUSE: TicketState.REFUSED,
    },
    TicketState.WAITING: {
        TicketEvent.ADMIT: TicketState.ADMITTED,
        TicketEvent.REFUSE: TicketState.REFUSED,
        TicketEvent.EXPIRE: TicketState.EXPIRED,
        TicketEvent.LEAVE: TicketState.LEFT,
    },
    TicketState.ADMITTED: {TicketEvent.LEAVE: TicketState.LEFT},
    TicketState.REFUSED: {},
    TicketState.EXPIRED: {},
    TicketState.LEFT: {},
}


class Ticket:
    """One request; only :class:`Admission` changes it."""

    __slots__ = ("due", "key", "priority", "refusal", "size", "state")

    def __init__(self, key: str, priority: int, size: int, due: float, state: TicketState = _ARRIVING) -> None:
        self.key = key
        self.priority = priority  # lower is earlier
        self.size = size  # bytes of its body
        self.due = due  # when it has waited long enough
        self.state = state
        self.refusal: Refusal | None = None  # of one that was refused or has expired

    def on(self, event: TicketEvent) -> None:
        """Take a step; one that is not in the table is a bug."""
        self.state = TRANSITIONS[self.state][event]


@dataclass(slots=True)
class _Account:
    """What one key has in flight or waiting, and how fast it came."""

    held: int = 0
    waiting: int = 0
    bucket: TokenBucket = field(default_factory=TokenBucket)


class Admission:
    """Hands out places. Whatever a call does to other tickets than its own comes back, once, from ``poll``."""

    def __init__(self, limits: Settings) -> None:
        self.limits = limits
        self.admitted = 0
        self.waiting = 0
        self.held_bytes = 0
        self.refused: Counter[Limit] = Counter()  # ever
        self._lanes: dict[int, dict[Ticket, None]] = {}  # by priority, in order of arrival; none is empty
        self._accounts: dict[str, _Account] = {}
        self._bucket = TokenBucket()
        self.news: list[Ticket] = []  # what ``poll`` would return

    def arrive(self, key: str, priority: int, size: int, now: float) -> Ticket:
        """Admit a request, have it wait, or refuse it: its state says which."""
        limits = self.limits
        ticket = Ticket(key, priority, size, now + limits.max_queue_wait_s)
        account = self._accounts.get(key) or self._new_account(key, now=now)
        if (refusal := self._at_the_door(ticket, account, now)) is not None:
            self._turn_away(ticket, TicketEvent.REFUSE, refusal)
            return ticket
        account.held += 1
        self.held_bytes += size
        if limits.max_key_rate is not None:
            account.bucket.take(limits.max_key_rate, now=now)
        if limits.max_rate is not None:
            self._bucket.take(limits.max_rate, now=now)
        if self.admitted < limits.max_concurrency:
            self._admit(ticket)
        else:
            self._queue(ticket)
        return ticket

    def hold(self, size: int) -> bool:
        """Charge bytes of a body that is not complete, and so has no ticket; False: there are not as many left."""
        if self.held_bytes + size > self.limits.max_inflight_bytes:
            return False
        self.held_bytes += size
        return True

    def charge(self, size: int) -> None:
        """Charge bytes that cannot be refused; fewer than 0: give back what was held."""
        self.held_bytes += size

    def no_bytes(self) -> Refusal:
        """Count a request that is refused while its body comes."""
        self.refused[Limit.BYTES] += 1
        return Refusal(Limit.BYTES, _LATER)

    def leave(self, ticket: Ticket) -> None:
        """Give back the place of a request that is over, or whose client has gone."""
        was = ticket.state
        ticket.on(_LEAVE)
        if was is _ADMITTED:
            self.admitted -= 1
        else:
            self._unqueue(ticket)
        self._release(ticket)
        if self._lanes:
            self._fill()

    def expire(self, *, now: float) -> None:
        """Send away those that have waited too long."""
        for ticket in [ticket for lane in self._lanes.values() for ticket in lane if now >= ticket.due]:
            self._unqueue(ticket)
            self._release(ticket)
            self._turn_away(ticket, TicketEvent.EXPIRE, Refusal(Limit.CONCURRENCY, _LATER))
            self.news.append(ticket)

    def change(self, limits: Settings) -> None:
        """Go by other limits from now on; nobody who was admitted is sent away."""
        self.limits = limits
        self._fill()
        while self.waiting > limits.max_queue:
            self._displace(next(reversed(self._lanes[max(self._lanes)])))

    def poll(self) -> Sequence[Ticket]:
        """Return the tickets that were admitted, refused or expired while they waited, in that order."""
        if not self.news:
            return []
        changed, self.news = self.news, []
        return changed

    def _at_the_door(self, ticket: Ticket, account: _Account, now: float) -> Refusal | None:
        """Check the limits of the key first: it is their owner who can do something about it."""
        limits = self.limits
        if limits.max_key_rate is not None and (seconds := account.bucket.wait(limits.max_key_rate, now=now)):
            return Refusal(Limit.KEY_RATE, ceil(seconds))
        if limits.max_key_concurrency is not None and account.held >= limits.max_key_concurrency:
            return Refusal(Limit.KEY_CONCURRENCY, _SOON)
        if limits.max_rate is not None and (seconds := self._bucket.wait(limits.max_rate, now=now)):
            return Refusal(Limit.RATE, ceil(seconds))
        if self.held_bytes + ticket.size > limits.max_inflight_bytes:
            return Refusal(Limit.BYTES, _LATER)
        if self.admitted < limits.max_concurrency:
            return None
        if self.waiting >= limits.max_queue and self._weakest(ticket) is None:
            return Refusal(Limit.QUEUE, _LATER)
        return None

    def _weakest(self, ticket: Ticket) -> Ticket | None:
        """Return the one that gives way to a ticket: the last of the least important among those that have to.

        No key takes the places of another one that has no more than its share of the queue.
        """
        waiting = {key: account.waiting for key, account in self._accounts.items() if account.waiting}
        keys = len(waiting.keys() | {ticket.key})
        yielding = {key for key, count in waiting.items() if key == ticket.key or count * keys > self.limits.max_queue}
        if yielding:
            for priority in sorted(self._lanes, reverse=True):
                if priority <= ticket.priority:
                    break
                for other in reversed(self._lanes[priority]):
                    if other.key in yielding:
                        return other
        return None

    def _release(self, ticket: Ticket) -> None:
        self._accounts[ticket.key].held -= 1
        self.held_bytes -= ticket.size

    def _admit(self, ticket: Ticket) -> None:
        ticket.on(_ADMIT)
        self.admitted += 1

    def _queue(self, ticket: Ticket) -> None:
        if self.waiting >= self.limits.max_queue and (weakest := self._weakest(ticket)) is not None:
            self._displace(weakest)
        ticket.on(TicketEvent.WAIT)
        self._lanes.setdefault(ticket.priority, {})[ticket] = None
        self.waiting += 1
        self._accounts[ticket.key].waiting += 1

    def _unqueue(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.priority]
        del lane[ticket]
        if not lane:
            del self._lanes[ticket.priority]
        self.waiting -= 1
        self._accounts[ticket.key].waiting -= 1

    def _displace(self, ticket: Ticket) -> None:
        """Refuse one that waits."""
        self._unqueue(ticket)
        self._release(ticket)
        self._turn_away(ticket, TicketEvent.REFUSE, Refusal(Limit.QUEUE, _LATER))
        self.news.append(ticket)

    def _fill(self) -> None:
        """Hand the free places to those that wait."""
        while self._lanes and self.admitted < self.limits.max_concurrency:
            ticket = next(iter(self._lanes[min(self._lanes)]))
            self._unqueue(ticket)
            self._admit(ticket)
            self.news.append(ticket)

    def _turn_away(self, ticket: Ticket, event: TicketEvent, refusal: Refusal) -> None:
        ticket.on(event)
        ticket.refusal = refusal
        self.refused[refusal.limit] += 1

    def _new_account(self, key: str, *, now: float) -> _Account:
        """Return an account for a key that has none. Before that, those that say nothing any more are dropped."""
        idle = [name for name, known in self._accounts.items() if not known.held and known.bucket.is_full(now=now)]
        for name in idle:
            del self._accounts[name]
        account = self._accounts[key] = _Account()
        return account
