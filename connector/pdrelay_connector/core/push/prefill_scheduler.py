"""P's scheduler in push: brings registrations of decode engines and this engine's workers together.

A registration may come before, during or after its prefill. P answers it once: PushDone, when every
worker has written everything and the lease was still held, or PushStopped. Until then the decode
engine uses its blocks for nothing else. If its connection ends before, it may ask over the next
one, and gets PushStopped when no worker writes any more.

A transfer belongs to the first decode engine that names it, while its connection lasts: other
engines can neither claim nor end it, nor get its KV.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, TypeVar

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import ConnId, EngineId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEnded
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import (
    MAX_SUMMED,
    CancelPushes,
    DropLeases,
    HeartbeatReply,
    Message,
    PeerGone,
    PeerMemory,
    PushAborted,
    PushDone,
    PushStalled,
    PushStopped,
    PushWritten,
    RankInfo,
    RankMemory,
    RankSums,
    RegisterPush,
    RenewLeases,
    StartPush,
    StopPush,
    WorkerHello,
    WriteStalled,
    fits,
)
from pdrelay_connector.core.ports import ConnectionLost, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.state_machine import transition

T = TypeVar("T")

# Registrations, and transfers heard of before their prefill: beyond it they are refused, or
# forgotten.
MAX_PUSHES = 65536
# of one connection, so that one engine does not use up what others need
MAX_PUSHES_PER_PEER = MAX_PUSHES // 4


class PushState(Enum):
    """State of a push to one reader, over all workers."""

    OPEN = auto()
    STOPPING = auto()  # workers have been told to stop
    OVER = auto()


class PushEvent(Enum):
    """What can happen to it."""

    WRITTEN = auto()  # by the last worker
    STOPPED = auto()
    DRAINED = auto()  # no worker writes any more


TRANSITIONS: Final[Mapping[PushState, Mapping[PushEvent, PushState]]] = {
    PushState.OPEN: {PushEvent.WRITTEN: PushState.OVER, PushEvent.STOPPED: PushState.STOPPING},
    PushState.STOPPING: {PushEvent.DRAINED: PushState.OVER},
    PushState.OVER: {},
}


@dataclass(slots=True)
class _Push:
    peer: ConnId
    order: RegisterPush
    writing_ranks: set[int]  # ranks that write, or may
    state: PushState = PushState.OPEN
    reason: str = ""  # why it stopped
    lease_lost: bool = False  # because the lease was over
    sums: list[RankSums] = field(default_factory=list[RankSums])  # of the workers that have written

    def on(self, event: PushEvent) -> None:
        self.state = transition(TRANSITIONS, self.state, event, f"the push to {self.order.reader}")


class _PushKey(NamedTuple):
    """Whom a push is for."""

    peer: ConnId
    reader: RequestId


@dataclass(slots=True)
class _EarlyInterest:
    """A decode engine's messages about a transfer before its prefill has finished."""

    peer: ConnId | None  # the connection that renews; absent: the transfer is not wanted any more
    until: float


@dataclass(slots=True)
class _Draining:
    """A push whose decode engine has disconnected, while workers may still write."""

    engine: EngineId | None
    writing_ranks: set[int]
    asker: ConnId | None = None  # the connection over which that engine wants to hear of its end


@dataclass(slots=True)
class _DecodePeer:
    """A decode engine: the memory of its ranks, and its registrations."""

    engine: EngineId | None = None
    ranks: dict[int, RankInfo] = field(default_factory=dict[int, RankInfo])  # by worker
    pushes: dict[RequestId, _Push] = field(default_factory=dict[RequestId, _Push])
    # blocks of all pushes, by KV cache group
    lent: Counter[int] = field(default_factory=Counter[int])
    # blocks that there are, by KV cache group
    capacity: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def is_known(self) -> bool:
        """Whether the memory of all its ranks is known."""
        return bool(self.ranks) and len(self.ranks) == next(iter(self.ranks.values())).workers

    def can_lend(self, order: RegisterPush) -> bool:
        """Whether it can lend these blocks, too: it cannot lend a block twice."""
        return all(
            self.lent[group] + blocks <= self.capacity.get(group, 0)
            for group, blocks in _blocks(order).items()
        )

    def add_rank(self, rank: RankInfo) -> bool:
        """Add the memory of a rank; false: it is impossible, or contradicts an earlier one."""
        first = next(iter(self.ranks.values()), rank)
        if (
            rank.rank >= rank.ranks
            or rank.stage >= rank.stages
            or (rank.ranks, rank.stages) != (first.ranks, first.stages)
            or self.ranks.setdefault(rank.worker, rank) != rank
        ):
            return False
        self.capacity.update({region.group: region.blocks for region in rank.regions})
        return True

    def add(self, push: _Push) -> None:
        """Take a registration in."""
        self.pushes[push.order.reader] = push
        self.lent.update(_blocks(push.order))

    def remove(self, push: _Push) -> None:
        """Forget one that is over."""
        del self.pushes[push.order.reader]
        self.lent.subtract(_blocks(push.order))


def _blocks(order: RegisterPush) -> dict[int, int]:
    """Return how many blocks of each KV cache group are lent."""
    return {group: len(lent.blocks) for group, lent in enumerate(order.groups)}


class PushCoordinator:
    """Runs on the control thread. Decode engines and our own workers connect here."""

    def __init__(
        self,
        link: Link,
        lease_manager: LeaseManager,
        counters: Counters,
        *,
        tokens: Mapping[int, bytes],
        registration_timeout: float,
    ) -> None:
        self._link = link
        self._lease_manager = lease_manager
        self._counters = counters
        self._workers = WorkerLinks(link, tokens)
        # s that a transfer without a prefill is remembered
        self._registration_timeout = registration_timeout
        self._seen_ranks: set[int] = set()  # ranks that may write, connected or not
        self._peers: dict[ConnId, _DecodePeer] = {}
        self._draining: dict[_PushKey, _Draining] = {}
        self._open = 0  # pushes of all decode engines
        self._leased: set[RequestId] = set()  # transfers whose lease has yet to be released
        self._by_request: dict[RequestId, dict[_PushKey, _Push]] = {}
        # These two are emptied from the front, which takes a plain dict longer the more it has
        # lost.
        # the longest unheard of first
        self._early: OrderedDict[RequestId, _EarlyInterest] = OrderedDict()
        self._early_by_conn: dict[ConnId, dict[RequestId, None]] = {}
        # transfers that are over -> remembered until
        self._over: OrderedDict[RequestId, float] = OrderedDict()

    def __len__(self) -> int:
        tables = (self._by_request, self._early, self._peers, self._over, self._draining)
        return sum(len(table) for table in tables)

    # ---- the engine

    def granted(self, request: RequestId, *, now: float) -> None:
        """Handle the end of a prefill: its lease is for the engine that named the transfer."""
        self._leased.add(request)
        self._over.pop(request, None)
        early = self._forget_early(request)
        pushes = self._by_request.get(request)
        if pushes:
            self._lease_manager.renew(next(iter(pushes)).peer, (request,), now=now)
        elif early is not None and early.peer is not None:
            self._lease_manager.renew(early.peer, (request,), now=now)
        elif early is not None:
            self._lease_manager.drop((request,))

    def is_writing(self, request: RequestId) -> bool:
        """Whether a transfer is registered, and so written or about to be."""
        return request in self._by_request

    def abandoned(self, request: RequestId, *, now: float) -> None:
        """The prefill ended without KV to hand over."""
        self._forget_early(request)
        self._stop_all(request, "the prefill ended without handing its KV over", now)

    def released(self, ended: Iterable[LeaseEnded], *, now: float) -> None:
        """These leases are over: nothing of them is to be read any more."""
        for released in ended:
            if released.request not in self._leased:
                continue  # it was to be read
            self._leased.discard(released.request)
            self._stop_all(released.request, released.text, now, lease_lost=True)

    def give_up(self, reason: str, *, now: float) -> None:
        """Stop all pushes."""
        for request in list(self._by_request):
            self._stop_all(request, reason, now)

    @property
    def may_write(self) -> bool:
        """Whether a worker of ours may still write into another engine."""
        return bool(self._open or self._draining)

    # ---- the network

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle an event of a connection that we accepted."""
        # first, so that nothing below sees a lease that is over
        self._lease_manager.advance(now=now)
        match event:
            case MessageReceived(conn, message):
                self._on_message(conn, message, now)
            case ConnectionLost(conn):
                self._lost(conn, now)
            case _:
                pass

    def advance(self, *, now: float) -> None:
        """Forget transfers that were spoken of and never prefilled, or are long over."""
        for request in _old(self._early, now, lambda early: early.until):
            self._forget_early(request)
        for request in _old(self._over, now, lambda until: until):
            del self._over[request]

    def _on_message(self, conn: ConnId, message: Message, now: float) -> None:
        match message:
            case RenewLeases(requests, pulled=True):
                self._lease_manager.send_leases_lost(
                    conn, self._lease_manager.renew(conn, requests, now=now)
                )
                self._link.send(conn, HeartbeatReply())
            case DropLeases(requests, pulled=True):
                self._lease_manager.drop(requests, conn)
            case RenewLeases(requests):
                self._lease_manager.send_leases_lost(conn, self._renewed(conn, requests, now))
                self._link.send(conn, HeartbeatReply())
            case DropLeases(requests):
                self._note_interest(
                    self._lease_manager.drop(requests, conn), conn, now, wants=False
                )
            case RankMemory(rank):
                self._on_rank_memory(conn, rank, now)
            case RegisterPush():
                self._register(conn, message, now)
            case CancelPushes(readers):
                self._stop_for(conn, readers)
            case WorkerHello():
                self._on_worker_hello(conn, message, now)
            case PushWritten() | PushAborted() | WriteStalled() if (
                worker := self._workers.rank_of(conn)
            ) is not None:
                self._on_worker_message(worker, message)
            case _:
                self._link.close(conn)  # nothing that a decode engine or a worker says
                self._lost(conn, now)

    def _lost(self, conn: ConnId, now: float) -> None:
        self._lease_manager.on_connection_lost(conn)
        self._workers.remove(conn)
        self._note_interest(list(self._early_by_conn.get(conn, ())), conn, now, wants=False)
        peer = self._peers.pop(conn, None)
        if peer is None:
            return
        self._open -= len(peer.pushes)
        for draining in self._draining.values():
            draining.asker = None if draining.asker == conn else draining.asker
        for push in peer.pushes.values():
            self._unlist(push)
            if ranks := push.writing_ranks & self._seen_ranks:
                self._draining[_PushKey(conn, push.order.reader)] = _Draining(peer.engine, ranks)
            if push.order.request not in self._by_request and not self._lease_manager.holds(
                push.order.request
            ):
                self._note_interest([push.order.request], conn, now, wants=False)
        self._workers.send_all(PeerGone(conn))

    # ---- decode engines

    def _renewed(self, conn: ConnId, requests: Sequence[RequestId], now: float) -> list[RequestId]:
        """Handle a heartbeat; return the transfers that are over, or another engine's."""
        without = self._lease_manager.renew(conn, requests, now=now)
        lease_lost = [
            request
            for request in without
            if request in self._over or self._lease_manager.holds(request)
        ]
        return lease_lost + self._note_interest(
            [request for request in without if not self._lease_manager.holds(request)], conn, now
        )

    def _owner(self, request: RequestId) -> ConnId | None:
        """Return who has spoken of a transfer first, and is still there."""
        if (holder := self._lease_manager.leases.holder(request)) is not None:
            return holder
        if pushes := self._by_request.get(request):
            return next(iter(pushes)).peer
        early = self._early.get(request)
        return early.peer if early is not None else None

    def _is_foreign(self, request: RequestId, conn: ConnId) -> bool:
        """Whether a transfer is another engine's; counted."""
        owner = self._owner(request)
        is_foreign = owner is not None and not self._lease_manager.leases.is_same(owner, conn)
        self._counters.count("foreign_messages", int(is_foreign))
        return is_foreign

    def _note_interest(
        self, requests: Iterable[RequestId], conn: ConnId, now: float, *, wants: bool = True
    ) -> list[RequestId]:
        """Remember messages about unfinished transfers; return the transfers of other engines.

        The latest message is at the end of the dict.
        """
        foreign: list[RequestId] = []
        for request in requests:
            if request in self._over:
                self._counters.count("unknown_transfer_messages")
            elif self._is_foreign(request, conn):
                foreign.append(request)
            else:
                self._counters.count("early_transfer_messages")
                self._forget_early(request)
                self._early[request] = _EarlyInterest(
                    conn if wants else None, now + self._registration_timeout
                )
                if wants:
                    self._early_by_conn.setdefault(conn, {})[request] = None
        return foreign

    def _forget_early(self, request: RequestId) -> _EarlyInterest | None:
        early = self._early.pop(request, None)
        if early is not None and early.peer is not None:
            names = self._early_by_conn[early.peer]
            del names[request]
            if not names:
                del self._early_by_conn[early.peer]
        return early

    def _on_rank_memory(self, conn: ConnId, rank: RankInfo, now: float) -> None:
        # After a silent cut D is back before our kernel gives its earlier connection up. Workers
        # must hear the end of that first: NIXL attaches an agent once. D has renewed what it still
        # wants over this one before.
        for earlier in [
            number
            for number in self._peers
            if number != conn and self._lease_manager.leases.is_same(number, conn)
        ]:
            self._link.close(earlier)
            self._lost(earlier, now)
        peer = self._peers.setdefault(conn, _DecodePeer(self._link.engine_of(conn)))
        memory = self._memory(conn, rank)
        if fits(memory) and peer.add_rank(rank):
            self._workers.send_all(memory)
        else:
            self._counters.count("unknown_transfer_messages")

    def _memory(self, conn: ConnId, rank: RankInfo) -> PeerMemory:
        """Return what our workers are told of a decode engine's rank."""
        return PeerMemory(conn, rank, self._link.engine_of(conn) or EngineId(""))

    def _register(self, conn: ConnId, order: RegisterPush, now: float) -> None:
        peer = self._peers.get(conn)
        if peer is not None and order.reader in peer.pushes:
            self._counters.count("unknown_transfer_messages")
        elif peer is None or not peer.is_known:
            reason = "the memory of the decode engine's ranks is not known"
            self._link.send(conn, PushStopped(order.reader, reason))
        elif order.request in self._over:
            self._counters.count("unknown_transfer_messages")
            self._link.send(conn, PushStopped(order.reader, f"transfer {order.request} is over"))
        elif self._is_foreign(order.request, conn):
            reason = f"transfer {order.request} is another decode engine's"
            self._link.send(conn, PushStopped(order.reader, reason))
        elif reason := self._exceeded_limit(conn, order, peer):
            self._counters.count("pushes_refused")
            self._link.send(conn, PushStopped(order.reader, reason))
        else:
            peer.add(push := _Push(conn, order, set(self._workers.ranks)))
            self._open += 1
            self._by_request.setdefault(order.request, {})[_PushKey(conn, order.reader)] = push
            self._counters.count("registrations")
            if self._lease_manager.holds(order.request):
                # it is this engine's from now on
                self._lease_manager.renew(conn, (order.request,), now=now)
            self._workers.send_all(StartPush(conn, order))

    def _exceeded_limit(self, conn: ConnId, order: RegisterPush, peer: _DecodePeer) -> str:
        """Return the limit that a registration would exceed, in words; empty: none."""
        if not peer.can_lend(order):
            return "more blocks are registered than the decode engine has"
        if len(peer.pushes) >= MAX_PUSHES_PER_PEER:
            return f"{len(peer.pushes)} registrations of yours are open"
        if self._open + len(self._draining) >= MAX_PUSHES:
            return f"{MAX_PUSHES} registrations are open"
        if not fits(StartPush(conn, order)):
            return "it names more blocks than an order to a worker can"
        return ""

    def _stop_for(self, conn: ConnId, readers: Iterable[RequestId]) -> None:
        peer = self._peers.get(conn, _DecodePeer())
        engine = self._link.engine_of(conn)
        draining = {
            key.reader: drained
            for key, drained in self._draining.items()
            if drained.engine == engine is not None
        }
        for reader in readers:
            if (push := peer.pushes.get(reader)) is not None:
                self._stop(push, "the decode engine does not want it")
            elif reader in draining:
                draining[reader].asker = conn
            else:
                self._counters.count("unknown_transfer_messages")
                # never registered, or answered before
                self._link.send(conn, PushStopped(reader, ""))

    # ---- our workers

    def _on_worker_hello(self, conn: ConnId, hello: WorkerHello, now: float) -> None:
        if not self._workers.add(conn, hello):
            self._link.close(conn)
            self._lost(conn, now)
            return
        self._seen_ranks.add(hello.rank)
        for number, peer in self._peers.items():
            for rank in peer.ranks.values():
                self._link.send(conn, self._memory(number, rank))
            # A rank that has said what became of its part must not write again: the others' word
            # may end the push.
            for push in [
                candidate
                for candidate in peer.pushes.values()
                if hello.rank in candidate.writing_ranks
            ]:
                self._link.send(conn, StartPush(number, push.order))
                if push.state is PushState.STOPPING:
                    self._link.send(conn, StopPush(number, push.order.reader))
        for key, draining in self._draining.items():
            if hello.rank in draining.writing_ranks:
                self._link.send(conn, StopPush(key.peer, key.reader))

    def _on_worker_message(
        self, rank: int, event: PushWritten | PushAborted | WriteStalled
    ) -> None:
        peer = self._peers.get(event.peer)
        push = peer.pushes.get(event.reader) if peer is not None else None
        if push is None:
            self._on_drained(rank, event)
            return
        match event:
            case PushWritten(_, _, sums):
                push.writing_ranks.discard(rank)
                if sums is not None and len(push.sums) < MAX_SUMMED:
                    push.sums.append(sums)
            case PushAborted(_, _, reason):
                push.writing_ranks.discard(rank)
                self._stop(push, reason)
            case WriteStalled(_, reader, reason):
                self._link.send(push.peer, PushStalled(reader, reason))
                self._stop(push, reason)
        self._end_if_drained(push)

    def _on_drained(self, rank: int, event: PushWritten | PushAborted | WriteStalled) -> None:
        """Handle a worker's message about a push whose decode engine has disconnected."""
        key = _PushKey(event.peer, event.reader)
        draining = self._draining.get(key)
        if draining is None or isinstance(event, WriteStalled):
            self._counters.count("unknown_transfer_messages")
            return
        draining.writing_ranks.discard(rank)
        if not draining.writing_ranks:
            del self._draining[key]
            if draining.asker is not None:
                self._link.send(
                    draining.asker, PushStopped(event.reader, "the connection was lost")
                )

    def _stop(self, push: _Push, reason: str, *, lease_lost: bool = False) -> None:
        if push.state is not PushState.OPEN:
            return
        push.on(PushEvent.STOPPED)
        push.reason = reason
        push.lease_lost = lease_lost
        for rank in push.writing_ranks:
            self._workers.send(rank, StopPush(push.peer, push.order.reader))
        push.writing_ranks &= self._seen_ranks
        self._end_if_drained(push)

    def _end_if_drained(self, push: _Push) -> None:
        if push.writing_ranks or push.state is PushState.OVER:
            return
        reader = push.order.reader
        request = push.order.request
        self._peers[push.peer].remove(push)
        self._open -= 1
        self._unlist(push)
        if push.state is PushState.STOPPING:
            push.on(PushEvent.DRAINED)
            self._link.send(push.peer, PushStopped(reader, push.reason, push.lease_lost))
            return
        push.on(PushEvent.WRITTEN)
        self._link.send(
            push.peer, PushDone(reader, self._lease_manager.holds(request), tuple(push.sums))
        )
        # several readers may share a prompt: the last one ends the lease
        if request not in self._by_request:
            self._lease_manager.finish(request)

    def _unlist(self, push: _Push) -> None:
        pushes = self._by_request[push.order.request]
        del pushes[_PushKey(push.peer, push.order.reader)]
        if not pushes:
            del self._by_request[push.order.request]

    def _stop_all(
        self, request: RequestId, reason: str, now: float, *, lease_lost: bool = False
    ) -> None:
        self._over.pop(request, None)
        self._over[request] = now + self._registration_timeout
        for push in list(self._by_request.get(request, {}).values()):
            self._stop(push, reason, lease_lost=lease_lost)


def _old(
    entries: OrderedDict[RequestId, T], now: float, until: Callable[[T], float]
) -> Iterator[RequestId]:
    """Name the first entries, for the caller to drop, whose time is over or that are too many."""
    while entries:
        request, entry = next(iter(entries.items()))
        if until(entry) > now and len(entries) <= MAX_PUSHES:
            return
        yield request
