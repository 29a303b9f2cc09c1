"""The prefill scheduler's half of push: bring decode engines' registrations and this engine's workers together.

A registration may come long before its prefill, during it, or after it. It ends with one answer to the decode engine:
Landed, when every worker has written everything and the lease still held, or Stopped. Until then, and not a moment
longer, the decode engine keeps its blocks out of everybody's reach.

A transfer is the decode engine's that speaks of it first, as long as its connection lasts: others may neither claim it,
nor end it, nor have its KV written to them.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, TypeVar

from xpyd_connector.core.counters import Tally
from xpyd_connector.core.ids import ConnId, RequestId
from xpyd_connector.core.lease.lease_table import Released
from xpyd_connector.core.lease.prefill_scheduler import Lender
from xpyd_connector.core.messages import (
    Alive,
    Arrived,
    Assign,
    Attend,
    Cease,
    Ceased,
    Departed,
    Drop,
    Landed,
    Memory,
    Message,
    RankInfo,
    Register,
    Renew,
    Stalled,
    Stop,
    Stopped,
    Stuck,
    Written,
)
from xpyd_connector.core.ports import Link, LinkEvent, Lost, Received
from xpyd_connector.core.session.worker_links import Crew
from xpyd_connector.core.state_machine import follow

T = TypeVar("T")

MAX_PUSHES = (
    65536  # registrations, and transfers heard of before their prefill: beyond it they are refused, or forgotten
)
MAX_PUSHES_OF_GUEST = MAX_PUSHES // 4  # of one connection, so that one engine does not use up what others need


class PushState(Enum):
    """Where a push to one reader is in its life, over all workers."""

    OPEN = auto()
    CEASING = auto()  # workers have been told to stop
    OVER = auto()


class PushEvent(Enum):
    """What can happen to it."""

    WRITTEN = auto()  # by the last worker
    STOPPED = auto()
    QUIET = auto()  # no worker writes any more


TRANSITIONS: Final[Mapping[PushState, Mapping[PushEvent, PushState]]] = {
    PushState.OPEN: {PushEvent.WRITTEN: PushState.OVER, PushEvent.STOPPED: PushState.CEASING},
    PushState.CEASING: {PushEvent.QUIET: PushState.OVER},
    PushState.OVER: {},
}


@dataclass(slots=True)
class _Push:
    guest: ConnId
    order: Register
    busy: set[int]  # ranks that write, or may
    state: PushState = PushState.OPEN
    reason: str = ""  # why it stopped
    lapsed: bool = False  # because the lease was over

    def on(self, event: PushEvent) -> None:
        self.state = follow(TRANSITIONS, self.state, event, f"the push to {self.order.reader}")


class _Reader(NamedTuple):
    """Whom a push is for."""

    guest: ConnId
    reader: RequestId


@dataclass(slots=True)
class _Early:
    """What a decode engine has said about a transfer before its prefill was done."""

    guest: ConnId | None  # who renews; absent: nobody wants it any more
    until: float


@dataclass(slots=True)
class _Guest:
    """A decode engine: its memory, rank by rank, and its registrations."""

    ranks: dict[int, RankInfo] = field(default_factory=dict[int, RankInfo])
    pushes: dict[RequestId, _Push] = field(default_factory=dict[RequestId, _Push])
    lent: Counter[int] = field(default_factory=Counter[int])  # blocks of all pushes, by KV cache group
    room: dict[int, int] = field(default_factory=dict[int, int])  # blocks that there are, by KV cache group

    @property
    def is_known(self) -> bool:
        """Whether it has told us the memory of all of its ranks."""
        return bool(self.ranks) and len(self.ranks) == next(iter(self.ranks.values())).ranks

    def has_room_for(self, order: Register) -> bool:
        """Whether it can lend these blocks, too: nobody can lend a block twice."""
        return all(
            self.lent[group] + len(lent.blocks) <= self.room.get(group, 0) for group, lent in enumerate(order.groups)
        )

    def introduce(self, rank: RankInfo) -> bool:
        """Take the memory of a rank in; false if it cannot be, or is known and differs."""
        known = next(iter(self.ranks.values()), rank)
        if rank.rank >= rank.ranks or rank.ranks != known.ranks or self.ranks.setdefault(rank.rank, rank) != rank:
            return False
        self.room.update({region.group: region.blocks for region in rank.regions})
        return True

    def add(self, push: _Push) -> None:
        """Take a registration in."""
        self.pushes[push.order.reader] = push
        self.lent.update({group: len(lent.blocks) for group, lent in enumerate(push.order.groups)})

    def remove(self, push: _Push) -> None:
        """Forget one that is over."""
        del self.pushes[push.order.reader]
        self.lent.subtract({group: len(lent.blocks) for group, lent in enumerate(push.order.groups)})


class Pushes:
    """Runs on the control thread. The connections of decode engines and of our own workers all end here."""

    def __init__(
        self, link: Link, lender: Lender, tally: Tally, *, tokens: Mapping[int, bytes], patience: float
    ) -> None:
        self._link = link
        self._lender = lender
        self._tally = tally
        self._crew = Crew(link, tokens)
        self._patience = patience  # s that a transfer nobody prefills is remembered
        self._have_attended: set[int] = set()  # ranks that may write, connected or not
        self._guests: dict[ConnId, _Guest] = {}
        self._open = 0  # pushes of all guests
        self._by_request: dict[RequestId, dict[_Reader, _Push]] = {}
        # These two are emptied from the front, which takes a plain dict longer the more it has lost.
        self._early: OrderedDict[RequestId, _Early] = OrderedDict()  # the longest unheard of first
        self._early_of: dict[ConnId, dict[RequestId, None]] = {}
        self._over: OrderedDict[RequestId, float] = (
            OrderedDict()
        )  # names of transfers that are over -> remembered until

    def __len__(self) -> int:
        return len(self._by_request) + len(self._early) + len(self._guests) + len(self._over)

    # ---- the engine

    def granted(self, request: RequestId, *, now: float) -> None:
        """The prefill is done and its blocks are leased: the lease is for whoever spoke up before."""
        self._over.pop(request, None)
        early, pushes = self._forget_early(request), self._by_request.get(request)
        if pushes:
            self._lender.renew(next(iter(pushes)).guest, (request,), now=now)
        elif early is not None and early.guest is not None:
            self._lender.renew(early.guest, (request,), now=now)
        elif early is not None:
            self._lender.drop((request,))

    def is_writing(self, request: RequestId) -> bool:
        """Whether a transfer is being written to somebody, or about to be."""
        return request in self._by_request

    def abandoned(self, request: RequestId, *, now: float) -> None:
        """The prefill ended without KV to hand over."""
        self._forget_early(request)
        self._end_all(request, "the prefill ended without handing its KV over", now)

    def released(self, ended: Iterable[Released], *, now: float) -> None:
        """These leases are over: nothing of them is to be read any more."""
        for released in ended:
            why = released.why.name.lower().replace("_", " ")
            self._end_all(released.request, f"its lease is over ({why})", now, lapsed=True)

    # ---- the network

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Take in what happened on a connection that somebody opened to us."""
        self._lender.advance(now=now)  # first, so that nothing below sees a lease that is over
        match event:
            case Received(conn, message):
                self._told(conn, message, now)
            case Lost(conn):
                self._lost(conn, now)
            case _:
                pass

    def advance(self, *, now: float) -> None:
        """Forget transfers that were spoken of and never prefilled, or are long over."""
        for request in _old(self._early, now, lambda early: early.until):
            self._forget_early(request)
        for request in _old(self._over, now, lambda until: until):
            del self._over[request]

    def _told(self, conn: ConnId, message: Message, now: float) -> None:
        match message:
            case Renew(requests):
                self._lender.tell_lapsed(conn, self._renewed(conn, requests, now))
                self._link.send(conn, Alive())
            case Drop(requests):
                self._note(self._lender.drop(requests, conn), conn, now, wants=False)
            case Memory(rank):
                self._introduce(conn, rank)
            case Register():
                self._register(conn, message, now)
            case Stop(readers):
                self._stop_for(conn, readers)
            case Attend():
                self._attend(conn, message, now)
            case Written() | Ceased() | Stalled() if (worker := self._crew.rank_of(conn)) is not None:
                self._worked(worker, message)
            case _:
                self._link.close(conn)  # nothing that a decode engine or a worker says
                self._lost(conn, now)

    def _lost(self, conn: ConnId, now: float) -> None:
        self._lender.lose(conn)
        self._crew.leave(conn)
        self._note(list(self._early_of.get(conn, ())), conn, now, wants=False)
        guest = self._guests.pop(conn, None)
        if guest is None:
            return
        self._open -= len(guest.pushes)
        for push in guest.pushes.values():
            self._unlist(push)
            if push.order.request not in self._by_request and not self._lender.holds(push.order.request):
                self._note([push.order.request], conn, now, wants=False)
        self._tell_workers(Departed(conn))

    # ---- decode engines

    def _renewed(self, conn: ConnId, requests: Sequence[RequestId], now: float) -> list[RequestId]:
        """Take in a heartbeat; return the transfers that are over, or another engine's."""
        without = self._lender.renew(conn, requests, now=now)
        lapsed = [request for request in without if request in self._over or self._lender.holds(request)]
        return lapsed + self._note([request for request in without if not self._lender.holds(request)], conn, now)

    def _owner(self, request: RequestId) -> ConnId | None:
        """Return who has spoken of a transfer first, and is still there."""
        if (holder := self._lender.holder(request)) is not None:
            return holder
        if pushes := self._by_request.get(request):
            return next(iter(pushes)).guest
        early = self._early.get(request)
        return early.guest if early is not None else None

    def _is_foreign(self, request: RequestId, conn: ConnId) -> bool:
        """Whether a transfer is another engine's; counted."""
        owner = self._owner(request)
        is_foreign = owner is not None and not self._lender.is_same(owner, conn)
        self._tally.count("foreign_messages", int(is_foreign))
        return is_foreign

    def _note(self, requests: Iterable[RequestId], conn: ConnId, now: float, *, wants: bool = True) -> list[RequestId]:
        """Remember what is said of transfers whose prefill is not done; return those that are another engine's.

        The latest word is at the end of the dict.
        """
        foreign: list[RequestId] = []
        for request in requests:
            if request in self._over:
                self._tally.count("late_notifications")
            elif self._is_foreign(request, conn):
                foreign.append(request)
            else:
                self._tally.count("early_notifications")
                self._forget_early(request)
                self._early[request] = _Early(conn if wants else None, now + self._patience)
                if wants:
                    self._early_of.setdefault(conn, {})[request] = None
        return foreign

    def _forget_early(self, request: RequestId) -> _Early | None:
        early = self._early.pop(request, None)
        if early is not None and early.guest is not None:
            names = self._early_of[early.guest]
            del names[request]
            if not names:
                del self._early_of[early.guest]
        return early

    def _introduce(self, conn: ConnId, rank: RankInfo) -> None:
        if self._guests.setdefault(conn, _Guest()).introduce(rank):
            self._tell_workers(Arrived(conn, rank))
        else:
            self._tally.count("late_notifications")

    def _register(self, conn: ConnId, order: Register, now: float) -> None:
        guest = self._guests.get(conn)
        if guest is None or not guest.is_known:
            self._link.send(conn, Stopped(order.reader, "the memory of the decode engine's ranks is not known"))
        elif order.reader in guest.pushes:
            self._tally.count("late_notifications")
        elif order.request in self._over:
            self._tally.count("late_notifications")
            self._link.send(conn, Stopped(order.reader, f"transfer {order.request} is over"))
        elif self._is_foreign(order.request, conn):
            self._link.send(conn, Stopped(order.reader, f"transfer {order.request} is another decode engine's"))
        elif not guest.has_room_for(order):
            self._tally.count("pushes_refused")
            self._link.send(conn, Stopped(order.reader, "more blocks are registered than the decode engine has"))
        elif len(guest.pushes) >= MAX_PUSHES_OF_GUEST:
            self._tally.count("pushes_refused")
            self._link.send(conn, Stopped(order.reader, f"{len(guest.pushes)} registrations of yours are open"))
        elif self._open >= MAX_PUSHES:
            self._tally.count("pushes_refused")
            self._link.send(conn, Stopped(order.reader, f"{MAX_PUSHES} registrations are open"))
        else:
            guest.add(push := _Push(conn, order, set(self._crew.ranks)))
            self._open += 1
            self._by_request.setdefault(order.request, {})[_Reader(conn, order.reader)] = push
            self._tally.count("registrations")
            if self._lender.holds(order.request):
                self._lender.renew(conn, (order.request,), now=now)  # it is this engine's from now on
            self._tell_workers(Assign(conn, order))

    def _stop_for(self, conn: ConnId, readers: Iterable[RequestId]) -> None:
        guest = self._guests.get(conn, _Guest())
        for reader in readers:
            if (push := guest.pushes.get(reader)) is not None:
                self._stop(push, "the decode engine does not want it")
            else:
                self._tally.count("late_notifications")
                self._link.send(conn, Stopped(reader, ""))  # never registered, or answered before

    # ---- our workers

    def _attend(self, conn: ConnId, attend: Attend, now: float) -> None:
        if not self._crew.admit(conn, attend):
            self._link.close(conn)
            self._lost(conn, now)
            return
        self._have_attended.add(attend.rank)
        for number, guest in self._guests.items():
            for info in guest.ranks.values():
                self._link.send(conn, Arrived(number, info))
            for push in guest.pushes.values():
                self._link.send(conn, Assign(number, push.order))
                if push.state is PushState.CEASING:
                    self._link.send(conn, Cease(number, push.order.reader))

    def _worked(self, rank: int, news: Written | Ceased | Stalled) -> None:
        guest = self._guests.get(news.guest)
        push = guest.pushes.get(news.reader) if guest is not None else None
        if push is None:
            self._tally.count("late_notifications")  # the decode engine has left meanwhile
            return
        match news:
            case Written():
                push.busy.discard(rank)
            case Ceased(_, _, reason):
                push.busy.discard(rank)
                self._stop(push, reason)
            case Stalled(_, reader, reason):
                self._link.send(push.guest, Stuck(reader, reason))
                self._stop(push, reason)
        self._end_if_quiet(push)

    def _stop(self, push: _Push, reason: str) -> None:
        if push.state is not PushState.OPEN:
            return
        push.on(PushEvent.STOPPED)
        push.reason = reason
        for rank in push.busy:
            self._crew.tell(rank, Cease(push.guest, push.order.reader))
        push.busy &= self._have_attended
        self._end_if_quiet(push)

    def _end_if_quiet(self, push: _Push) -> None:
        if push.busy or push.state is PushState.OVER:
            return
        reader, request = push.order.reader, push.order.request
        self._guests[push.guest].remove(push)
        self._open -= 1
        self._unlist(push)
        if push.state is PushState.CEASING:
            push.on(PushEvent.QUIET)
            self._link.send(push.guest, Stopped(reader, push.reason, push.lapsed))
            return
        push.on(PushEvent.WRITTEN)
        self._link.send(push.guest, Landed(reader, self._lender.holds(request)))
        if request not in self._by_request:  # several readers may share a prompt: the last one ends the lease
            self._lender.finish(request)

    def _unlist(self, push: _Push) -> None:
        pushes = self._by_request[push.order.request]
        del pushes[_Reader(push.guest, push.order.reader)]
        if not pushes:
            del self._by_request[push.order.request]

    def _end_all(self, request: RequestId, reason: str, now: float, *, lapsed: bool = False) -> None:
        self._over.pop(request, None)
        self._over[request] = now + self._patience
        for push in list(self._by_request.get(request, {}).values()):
            push.lapsed = lapsed and push.state is PushState.OPEN
            self._stop(push, reason)

    def _tell_workers(self, message: Message) -> None:
        for rank in self._crew.ranks:
            self._crew.tell(rank, message)


def _old(entries: OrderedDict[RequestId, T], now: float, until: Callable[[T], float]) -> Iterator[RequestId]:
    """Name the first entries, for the caller to drop, whose time is over or that are too many."""
    while entries:
        request, entry = next(iter(entries.items()))
        if until(entry) > now and len(entries) <= MAX_PUSHES:
            return
        yield request
