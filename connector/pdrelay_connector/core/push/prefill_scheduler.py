"""P's scheduler in push: brings registrations of decode engines and this engine's workers together.

A registration may come before, during or after its prefill. P answers it once: PushDone, when every
worker has written everything and the lease was still held, or PushStopped. Until then the decode
engine uses its blocks for nothing else. If its connection ends before, it may ask over the next
one, and gets PushStopped when no worker writes any more.

A transfer belongs to the first decode engine that names it, while its connection lasts: other
engines can neither claim nor end it, nor get its KV.
"""

from collections.abc import Iterable, Mapping, Sequence

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
    RegisterPush,
    RenewLeases,
    StartPush,
    StopPush,
    WorkerHello,
    WriteStalled,
    fits,
)
from pdrelay_connector.core.ports import ConnectionLost, Link, LinkEvent, MessageReceived
from pdrelay_connector.core.push.registered_push import (
    DecodePeer,
    DrainingPush,
    PushEvent,
    PushKey,
    PushState,
    RegisteredPush,
)
from pdrelay_connector.core.push.remembered_transfers import RememberedTransfers
from pdrelay_connector.core.session.worker_links import WorkerLinks

MAX_PUSHES = 65536  # registrations; beyond it they are refused
# of one connection, so that one engine does not use up what others need
MAX_PUSHES_PER_PEER = MAX_PUSHES // 4


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
        self._remembered = RememberedTransfers(registration_timeout)
        self._seen_ranks: set[int] = set()  # ranks that may write, connected or not
        self._peers: dict[ConnId, DecodePeer] = {}
        self._draining: dict[PushKey, DrainingPush] = {}
        self._leased: set[RequestId] = set()  # transfers whose lease has yet to be released
        self._by_request: dict[RequestId, dict[PushKey, RegisteredPush]] = {}

    def __len__(self) -> int:
        tables = (self._by_request, self._remembered, self._peers, self._draining)
        return sum(len(table) for table in tables)

    # ---- the engine

    def granted(self, request: RequestId, *, now: float) -> None:
        """Handle the end of a prefill: its lease is for the engine that named the transfer."""
        self._leased.add(request)
        self._remembered.begin_again(request)
        early = self._remembered.take_early(request)
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
        self._remembered.take_early(request)
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
        return bool(self._by_request or self._draining)

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
        self._remembered.advance(now=now)

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
        self._note_interest(self._remembered.wanted_by(conn), conn, now, wants=False)
        peer = self._peers.pop(conn, None)
        if peer is None:
            return
        for draining in self._draining.values():
            draining.asker = None if draining.asker == conn else draining.asker
        for push in peer.pushes.values():
            self._unlist(push)
            if ranks := push.writing_ranks & self._seen_ranks:
                self._draining[push.key] = DrainingPush(peer.engine, ranks)
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
            if self._remembered.is_over(request) or self._lease_manager.holds(request)
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
        return self._remembered.owner(request)

    def _is_foreign(self, request: RequestId, conn: ConnId) -> bool:
        """Whether a transfer is another engine's; counted."""
        owner = self._owner(request)
        is_foreign = owner is not None and not self._lease_manager.leases.is_same(owner, conn)
        self._counters.count("foreign_messages", int(is_foreign))
        return is_foreign

    def _note_interest(
        self, requests: Iterable[RequestId], conn: ConnId, now: float, *, wants: bool = True
    ) -> list[RequestId]:
        """Remember messages about unfinished transfers; return the transfers of other engines."""
        foreign: list[RequestId] = []
        for request in requests:
            if self._remembered.is_over(request):
                self._counters.count("unknown_transfer_messages")
            elif self._is_foreign(request, conn):
                foreign.append(request)
            else:
                self._counters.count("early_transfer_messages")
                self._remembered.note(request, conn if wants else None, now=now)
        return foreign

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
        peer = self._peers.setdefault(conn, DecodePeer(self._link.engine_of(conn)))
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
        elif self._remembered.is_over(order.request):
            self._counters.count("unknown_transfer_messages")
            self._link.send(conn, PushStopped(order.reader, f"transfer {order.request} is over"))
        elif self._is_foreign(order.request, conn):
            reason = f"transfer {order.request} is another decode engine's"
            self._link.send(conn, PushStopped(order.reader, reason))
        elif reason := self._exceeded_limit(conn, order, peer):
            self._counters.count("pushes_refused")
            self._link.send(conn, PushStopped(order.reader, reason))
        else:
            peer.add(push := RegisteredPush(conn, order, set(self._workers.ranks)))
            self._by_request.setdefault(order.request, {})[push.key] = push
            self._counters.count("registrations")
            if self._lease_manager.holds(order.request):
                # it is this engine's from now on
                self._lease_manager.renew(conn, (order.request,), now=now)
            self._workers.send_all(StartPush(conn, order))

    def _exceeded_limit(self, conn: ConnId, order: RegisterPush, peer: DecodePeer) -> str:
        """Return the limit that a registration would exceed, in words; empty: none."""
        if not peer.can_lend(order):
            return "more blocks are registered than the decode engine has"
        if len(peer.pushes) >= MAX_PUSHES_PER_PEER:
            return f"{len(peer.pushes)} registrations of yours are open"
        open_pushes = sum(len(known.pushes) for known in self._peers.values())
        if open_pushes + len(self._draining) >= MAX_PUSHES:
            return f"{MAX_PUSHES} registrations are open"
        if not fits(StartPush(conn, order)):
            return "it names more blocks than an order to a worker can"
        return ""

    def _stop_for(self, conn: ConnId, readers: Iterable[RequestId]) -> None:
        peer = self._peers.get(conn, DecodePeer())
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
        key = PushKey(event.peer, event.reader)
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

    def _stop(self, push: RegisteredPush, reason: str, *, lease_lost: bool = False) -> None:
        if push.state is not PushState.OPEN:
            return
        push.on(PushEvent.STOPPED)
        push.reason = reason
        push.lease_lost = lease_lost
        for rank in push.writing_ranks:
            self._workers.send(rank, StopPush(push.peer, push.order.reader))
        push.writing_ranks &= self._seen_ranks
        self._end_if_drained(push)

    def _end_if_drained(self, push: RegisteredPush) -> None:
        if push.writing_ranks or push.state is PushState.OVER:
            return
        reader = push.order.reader
        request = push.order.request
        self._peers[push.peer].remove(push)
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

    def _unlist(self, push: RegisteredPush) -> None:
        pushes = self._by_request[push.order.request]
        del pushes[push.key]
        if not pushes:
            del self._by_request[push.order.request]

    def _stop_all(
        self, request: RequestId, reason: str, now: float, *, lease_lost: bool = False
    ) -> None:
        self._remembered.end(request, now=now)
        for push in list(self._by_request.get(request, {}).values()):
            self._stop(push, reason, lease_lost=lease_lost)
