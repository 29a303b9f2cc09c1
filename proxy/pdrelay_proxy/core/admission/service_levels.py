"""What classes mean for the queue: whose turn it is, for whom engines have room, and who is too late.

A request that can still meet its target is on time. The order is by rank; within a rank those on time come first, then
by priority and deadline. Nobody is let in for whom a more important class would miss its target: the engines' queues
may be filled only up to a quarter of what the tightest target of such a class leaves. So what may wait waits here,
where it can be overtaken, and not in an engine.

So that nobody waits for ever, those who wait the longest get one token of eight, whatever their class is.
"""

from collections.abc import Mapping
from math import ceil, inf
from typing import Final

from pdrelay_proxy.core.admission.engine_outlook import EngineOutlook, OwnTimes
from pdrelay_proxy.core.admission.fair_shares import FairShares
from pdrelay_proxy.core.admission.limits import Limit, Refusal
from pdrelay_proxy.core.admission.service_classes import OnMiss, ServiceClass, ServiceClasses
from pdrelay_proxy.core.admission.ticket import Ticket
from pdrelay_proxy.settings import Settings

AIM: Final = 0.8  # part of a target that is planned for: what is expected is not certain
LEFT: Final = 0.25  # part of what a target leaves that requests of other classes may fill
AGEING: Final = 8  # of so many tokens one is of those who wait the longest
INDEX_BITS: Final = 4  # of a place in the queue: the number of a class
_RANK_BIT: Final = 72  # above the priority, which has 18 digits
_KEPT: Final = 0.9  # of the mean of what requests of a class took before, with each one
_RETRY_MOST_S: Final = 60
_REFUSE: Final = OnMiss.REFUSE  # looking a member up takes as long as a call
_SERVE: Final = OnMiss.SERVE
_CLASS: Final = Limit.CLASS_TARGET


class ClassEntry:
    """How a request comes to the queue in a class."""

    __slots__ = ("outlook", "own", "service_class", "share")

    def __init__(
        self, service_class: ServiceClass, own: OwnTimes | None, outlook: EngineOutlook | None, share: float = 1.0
    ) -> None:
        """``own`` and ``outlook``: None: not measured yet, so nothing is expected of it.

        ``share``: of the work for all its prompts, what is served at its own place: the others take their own.
        """
        self.service_class = service_class
        self.own = own
        self.outlook = outlook
        self.share = share


class ClassTicket:
    """What a ticket has where there are classes."""

    __slots__ = ("arrived_at", "deadline", "is_late", "own", "priority", "service_class", "share")

    def __init__(
        self, service_class: ServiceClass, priority: int, own: OwnTimes | None, now: float, share: float = 1.0
    ) -> None:
        self.service_class = service_class
        self.share = share  # of its work, what follows when it is let in
        self.priority = priority  # as its client says
        self.own = own
        self.arrived_at = now
        self.deadline = inf if service_class.ttft_s is None else now + service_class.ttft_s
        self.is_late = False  # it could not meet its target any more if it were next

    @property
    def compute_s(self) -> float:
        """Seconds of work that follow when it is let in."""
        return 0.0 if self.own is None else self.own.compute_s * self.share

    def part(self, share: float) -> "ClassTicket":
        """Return what the place of one of its prompts has, which is that share of its work."""
        part = ClassTicket(self.service_class, self.priority, self.own, self.arrived_at, share)
        part.is_late = self.is_late
        return part

    @property
    def place(self) -> int:
        """Its place in the queue: rank, on time or late, priority; and then its class, which does not count."""
        rank = self.service_class.rank * 2 + self.is_late
        return (rank << _RANK_BIT) + (self.priority << INDEX_BITS) + self.service_class.number


class ServiceLevels:
    """The rules of one router's classes. It changes no ticket but by its place."""

    def __init__(self, classes: ServiceClasses) -> None:
        self.classes = classes
        self.outlook: EngineOutlook | None = None  # of the latest look; None: engines are not measured
        self._ranked = sorted(classes.by_name.values(), key=_rank)
        self._own = dict[str, float]()  # by class: to a first token of its requests, without queues, on the mean
        self._passed = 0  # tokens of those who were let in since, before the one who waits the longest

    def join(self, ticket: Ticket, entry: ClassEntry | None, now: float) -> None:
        """Give a ticket its place; without an entry it has no class, and that of those who name none."""
        if entry is None:
            ticket.priority = ClassTicket(self.classes.default, ticket.priority, None, now).place
            return
        self.outlook = entry.outlook
        own, service_class = entry.own, entry.service_class
        ticket.of_class = ClassTicket(service_class, ticket.priority, own, now, entry.share)
        if own is not None:
            before = self._own.get(service_class.name, own.ttft_s)
            self._own[service_class.name] = _KEPT * before + (1.0 - _KEPT) * own.ttft_s
        if service_class.max_wait_s is not None:
            ticket.due = now + service_class.max_wait_s
        ticket.of_class.is_late = not self.is_possible(ticket.of_class, now)
        ticket.priority = ticket.of_class.place

    def rejoin(self, ticket: Ticket, now: float) -> None:
        """Give a ticket a place by other classes than those it came with."""
        old = ticket.of_class
        service_class = self.classes.default
        if old is None:
            ticket.of_class = ClassTicket(service_class, ticket.priority, None, now)
        else:
            service_class = self.classes.by_name.get(old.service_class.name, service_class)
            ticket.of_class = ClassTicket(service_class, old.priority, old.own, old.arrived_at, old.share)
            ticket.of_class.is_late = not self.is_possible(ticket.of_class, now)
        ticket.priority = ticket.of_class.place

    def is_possible(self, one: ClassTicket, now: float, *, ahead_s: float = 0.0) -> bool:
        """Tell whether one can meet its target if it is let in now, or behind so many seconds of others' work."""
        outlook, own, ttft_s = self.outlook, one.own, one.service_class.ttft_s
        if outlook is None or own is None or ttft_s is None:
            return True
        return now + outlook.queue_s + ahead_s + own.ttft_s <= one.arrived_at + AIM * ttft_s

    def ahead_s(self, ticket: Ticket, lanes: Mapping[int, Mapping[Ticket, None]]) -> float:
        """Return how long engines take for those in the queue whose turn is before a ticket's."""
        outlook, seconds = self.outlook, 0.0
        if outlook is None or not outlook.queues:
            return 0.0
        for place, lane in lanes.items():
            if place >> INDEX_BITS <= ticket.priority >> INDEX_BITS:
                for other in lane:
                    if other.of_class is not None and other.of_class.own is not None:
                        seconds += other.of_class.own.compute_s
        return seconds / len(outlook.queues)

    def refusal(self, ticket: Ticket, lanes: Mapping[int, Mapping[Ticket, None]], now: float) -> Refusal | None:
        """Refuse one that comes, if its class says so and it would miss its target, or others theirs."""
        one = ticket.of_class
        if one is None or one.service_class.on_miss is not _REFUSE:
            return None
        ahead_s = self.ahead_s(ticket, lanes)
        is_free = self.outlook is None or self.outlook.queue_s + ahead_s == 0.0
        # An engine that is free takes it, however long: else one wrong measurement would keep all out, and no other
        # would follow.
        if not is_free and not self.is_possible(one, now, ahead_s=ahead_s):
            return self.too_late(one, now, ahead_s=ahead_s)
        return self._spoils(one)

    def too_late(self, one: ClassTicket, now: float, *, ahead_s: float = 0.0) -> Refusal:
        """Say why one is refused that cannot meet its target."""
        queue_s = ahead_s + (0.0 if self.outlook is None else self.outlook.queue_s)
        own_s, ttft_s = 0.0 if one.own is None else one.own.ttft_s, one.service_class.ttft_s or 0.0
        waited_s = now - one.arrived_at
        waited = f"it has waited {waited_s:.2g} s, and " if waited_s > 0 else ""
        text = (
            f"{waited}its first token is expected in {queue_s + own_s:.2g} s, {queue_s:.2g} s of them behind others: "
            f"the class {one.service_class.name} has a target of {ttft_s:g} s"
        )
        return Refusal(_CLASS, _retry_after(queue_s + own_s - ttft_s), text)

    def expired(self, one: ClassTicket, seconds: float) -> Refusal:
        """Say why one is sent away that has waited as long as its class says."""
        text = f"the engines had no room for this request within {seconds:g} s, which the class "
        return Refusal(_CLASS, _retry_after(seconds), f"{text}{one.service_class.name} waits at most")

    def has_turn(self, ticket: Ticket, lanes: Mapping[int, Mapping[Ticket, None]]) -> bool:
        """Tell whether one that comes need not wait for its turn, or for room."""
        one = ticket.of_class
        if one is None or one.service_class.on_miss is _SERVE:
            return True
        if lanes and min(lanes) >> INDEX_BITS <= ticket.priority >> INDEX_BITS:
            return False
        return self._spoils(one) is None

    def next(self, lanes: Mapping[int, Mapping[Ticket, None]], shares: FairShares | None) -> Ticket | None:
        """Return whose turn it is; None: there is no room for whoever it is."""
        oldest = min([next(iter(lane)) for lane in lanes.values()], key=_arrived_at)
        if self._passed >= (AGEING - 1) * max(1, oldest.tokens):
            return oldest
        first = min(lanes) >> INDEX_BITS
        places = [place for place in lanes if place >> INDEX_BITS == first]
        heads = [next(iter(lanes[place])) if shares is None else shares.next(place) for place in places]
        ticket = heads[0] if len(heads) == 1 else min(heads, key=_deadline)
        one = ticket.of_class
        return ticket if one is None or self._spoils(one) is None else None

    def admitted(self, ticket: Ticket, lanes: Mapping[int, Mapping[Ticket, None]]) -> None:
        """One was let in, and waits no more."""
        one = ticket.of_class
        if one is None:
            return
        if self.outlook is not None and one.own is not None:
            self.outlook.add(one.compute_s)
        heads = [next(iter(lane)) for lane in lanes.values()]
        if heads and min([_arrived_at(head) for head in heads]) < one.arrived_at:
            self._passed += max(1, ticket.tokens)
        else:
            self._passed = 0

    def _spoils(self, one: ClassTicket) -> Refusal | None:
        """Say whose target would be missed if this one were let in now; None: nobody's."""
        outlook, own, service_class = self.outlook, one.own, one.service_class
        if outlook is None or own is None or service_class.on_miss is _SERVE:
            return None
        queue_s = outlook.queue_s
        with_it_s = outlook.queue_with(one.compute_s)
        for other in self._ranked:
            if other.rank > service_class.rank:
                break
            is_before = other.rank < service_class.rank or one.is_late
            most = self._most_s(other)
            if other.ttft_s is not None and is_before and queue_s > 0.0 and with_it_s > most:
                return Refusal(
                    _CLASS,
                    _retry_after(with_it_s - most),
                    f"engines would be busy for {with_it_s:.2g} s with this request, and may be for {most:.2g} s with "
                    f"those of the class {service_class.name}: the class {other.name} has a target of "
                    f"{other.ttft_s:g} s",
                )
            if other.itl_s is not None and outlook.step_s > other.itl_s and not outlook.has_idle_decode:
                return Refusal(
                    _CLASS,
                    1,
                    f"with one more stream decode engines would take {outlook.step_s * 1e3:.3g} ms from token to "
                    f"token: the class {other.name} has a target of {other.itl_s * 1e3:g} ms",
                )
        return None

    def _most_s(self, service_class: ServiceClass) -> float:
        """Return how long engines may be busy with others, so that requests of a class still meet their target."""
        ttft_s = service_class.ttft_s or 0.0
        return max(0.0, ttft_s - self._own.get(service_class.name, 0.0)) * LEFT


def levels_of(settings: Settings) -> ServiceLevels | None:
    """Return the rules of the settings' classes; None: there are none. Raises ConfigError."""
    classes = ServiceClasses.of(settings.classes, settings.default_class)
    return None if classes is None else ServiceLevels(classes)


def _rank(one: ServiceClass) -> int:
    return one.rank


def _arrived_at(ticket: Ticket) -> float:
    return 0.0 if ticket.of_class is None else ticket.of_class.arrived_at


def _deadline(ticket: Ticket) -> float:
    return inf if ticket.of_class is None else ticket.of_class.deadline


def _retry_after(seconds: float) -> int:
    return max(1, min(_RETRY_MOST_S, ceil(seconds)))
