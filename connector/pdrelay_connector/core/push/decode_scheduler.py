"""D's scheduler in push: lend blocks to a prefill engine (P) until it has written them, or never
will.

P answers each registration with PushDone or PushStopped. If we abort one before (request aborted,
timeout, P silent), the load fails at once, but its blocks stay unused because P may still write
into them. They are free when P sends PushStopped; or, if its connection has ended, when all that P
had sent must have arrived (``lost_peer.py``). If P is back, D asks it for PushStopped.

A registration must not be sent again after its connection has ended. But P closes idle connections.
So over one that has been idle for long, a push is registered only after P has answered a heartbeat.
If the connection ends before, P has not received the registration, and D connects again.

Where NIXL cannot reach the cache, D lends slots of a host buffer, as soon as there are enough, and
copies them into the cache when P is done.
"""

from collections.abc import Sequence
from math import inf

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import Deadlines, earliest
from pdrelay_connector.core.ids import ConnId, EngineId, RequestId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.messages import (
    CancelPushes,
    HeartbeatReply,
    LentBlocks,
    Message,
    PushDone,
    PushStalled,
    PushStopped,
    RankInfo,
    RankMemory,
    RankSums,
    RegisterPush,
    by_message,
    fits,
)
from pdrelay_connector.core.ports import Link
from pdrelay_connector.core.push.expected_push import (
    ExpectedPush,
    PushOrder,
    ReceiveEvent,
    ReceiveState,
)
from pdrelay_connector.core.push.lost_peer import LostPeers
from pdrelay_connector.core.results import BlocksReleased, LoadChecks, LoadResult
from pdrelay_connector.core.session.peers import Peer, PeerState, PeerTable
from pdrelay_connector.core.staging.decode_scheduler import StagingReceiver
from pdrelay_connector.core.staging.kept_slots import KeptSlots
from pdrelay_connector.errors import ConnectorError, IllegalTransition


class PushReceiver:
    """Runs on the control thread."""

    def __init__(
        self,
        link: Link,
        peers: PeerTable,
        lease_renewer: LeaseRenewer,
        counters: Counters,
        ranks: Sequence[RankInfo],
        *,
        timeout: float,
        peer_timeout: float,
        contention_timeout: float = inf,
        staging_receiver: StagingReceiver | None = None,
    ) -> None:
        self._link = link
        self._peers = peers
        self._lease_renewer = lease_renewer
        self._counters = counters
        self._ranks = ranks
        self._timeout = timeout  # s from registering to the KV being there
        self._peer_timeout = peer_timeout  # s that P may leave a heartbeat unanswered
        # s that a push may keep others waiting for its slots: they may be what it waits for
        self._contention_timeout = contention_timeout
        self._staging_receiver = staging_receiver  # absent unless our cache is out of NIXL's reach
        self._pushes: dict[RequestId, ExpectedPush] = {}
        # dicts, because they keep their order
        self._by_engine: dict[EngineId, dict[RequestId, None]] = {}
        # WAITING for P to answer, in their order
        self._awaiting_reply: dict[EngineId, dict[RequestId, None]] = {}
        self._lost_peers = LostPeers(peers)  # of the QUARANTINED
        self._deadlines: Deadlines[RequestId] = Deadlines()  # of those that P is to write
        self._contention_deadlines: Deadlines[RequestId] = Deadlines()
        self._kept_slots = KeptSlots[RequestId](contention_timeout)
        self._results: list[LoadResult | BlocksReleased] = []

    def __len__(self) -> int:
        return len(self._pushes)

    def expect(self, order: PushOrder, *, now: float) -> None:
        """Lend blocks to P; :meth:`take_results` returns the result."""
        if order.request in self._pushes:
            raise IllegalTransition(f"request {order.request} is registered twice")
        push = self._pushes[order.request] = ExpectedPush(order, lent=order.groups)
        self._by_engine.setdefault(order.engine, {})[order.request] = None
        if self._staging_receiver is None:
            self._deadlines.set(order.request, now + self._timeout)
            self._approach(push, now)
            return
        push.state = ReceiveState.QUEUED
        try:
            self._staging_receiver.slots.enqueue(
                order.request, [len(lent.blocks) for lent in order.groups]
            )
        except ConnectorError as exc:
            self._lease_renewer.release(order.request, order.engine)
            self._fail(push, "loads_failed_staging", str(exc))
        else:
            self._kept_slots.wait(order.request, now=now)
            self._give_room(self._staging_receiver, now)

    def _give_room(self, staging_receiver: StagingReceiver, now: float) -> None:
        # a push that fails at once frees slots for the next
        while granted := staging_receiver.slots.take_granted():
            for request, groups in granted:
                push = self._pushes[request]
                push.on(ReceiveEvent.SLOTS_GRANTED)
                self._kept_slots.forget(request)
                self._deadlines.set(request, now + self._timeout)
                self._contention_deadlines.set(request, now + self._contention_timeout)
                push.lent = [
                    LentBlocks(lent.start, lent.stop, slots)
                    for lent, slots in zip(push.lent, groups, strict=True)
                ]
                self._approach(push, now)

    def _approach(self, push: ExpectedPush, now: float) -> None:
        order = push.order
        peer = self._peers.ensure_connected(order.engine, order.address, now=now)
        if peer.state is PeerState.CONNECTED and peer.is_idle(now=now):
            # The lease renewer has sent a heartbeat.
            self._awaiting_reply.setdefault(order.engine, {})[order.request] = None
        elif peer.state is PeerState.CONNECTED:
            self._register(push, peer)
        elif peer.is_refused:
            self._fail_unmet(push, peer)

    def stop(self, request: RequestId) -> None:
        """The request is aborted."""
        if (push := self._pushes.get(request)) is not None:
            self._abort(push, "loads_aborted", "the request was aborted")

    def give_up(self, reason: str) -> None:
        """Stop all pushes. None is left (``len()``) when no engine writes here any more."""
        for push in list(self._pushes.values()):
            self._abort(push, "loads_aborted", reason)

    def on(self, conn: ConnId, message: Message) -> bool:
        """Handle a message of P; false: it is for another object."""
        match message:
            case PushDone(reader, held, sums):
                self._on_push_done(conn, reader, sums, held=held)
            case PushStopped():
                self._on_stopped(conn, message)
            case PushStalled(reader, reason):
                if (push := self._expected_push(conn, reader)) is not None:
                    self._abort(push, "loads_failed_timeout", reason)
            case HeartbeatReply():
                self._on_heartbeat_reply(conn)
                return False  # it answers the lease renewer
            case _:
                return False
        return True

    def _on_heartbeat_reply(self, conn: ConnId) -> None:
        """Register what waited for P to show that it still listens on this connection."""
        if (peer := self._peers.find(conn)) is not None:
            for request in self._awaiting_reply.pop(peer.engine, ()):
                self._register(self._pushes[request], peer)

    def peer_changed(self, peer: Peer, *, now: float) -> None:
        """Handle a change of a prefill engine's connection."""
        self._awaiting_reply.pop(peer.engine, None)
        if peer.state is PeerState.CONNECTED:
            for rank in self._ranks:
                self._link.send(peer.conn, RankMemory(rank))
            self._ask_about_quarantined(peer)
        self._lost_peers.peer_changed(peer, now=now)
        for push in [self._pushes[request] for request in self._by_engine.get(peer.engine, ())]:
            if push.ignores_peer:
                continue
            if peer.state is PeerState.CONNECTED and push.state is ReceiveState.WAITING:
                self._register(push, peer)
            elif peer.is_refused and push.state is ReceiveState.WAITING:
                self._fail_unmet(push, peer)
            elif peer.state is PeerState.GONE:
                self._on_peer_lost(push, peer, now)

    def advance(self, *, now: float) -> float | None:
        """Handle expired deadlines; return when to be called again at the latest."""
        if self._staging_receiver is not None:
            for request, failure in self._staging_receiver.take_copied():
                self._on_copied_in(self._pushes[request], failure)
            self._give_room(self._staging_receiver, now)
        for request in self._deadlines.take_due(now=now):
            reason = f"nothing was written within {self._timeout:g} s"
            self._abort(self._pushes[request], "loads_failed_timeout", reason)
        for request in self._lost_peers.take_over(now=now):
            self._release(self._pushes[request])
        for peer, answer_by in self._awaited_peers():
            if now >= answer_by:
                self._abort_all_of(peer)
        for request in self._contention_deadlines.take_due(now=now) if self._is_contended else ():
            reason = (
                f"nothing came for {self._contention_timeout:g} s, and others wait for its slots "
                f"of host memory"
            )
            self._abort(self._pushes[request], "loads_failed_staging", reason)
        # late: everything above may have failed a push that keeps its slots
        for request in self._kept_slots.take_overdue(now=now):
            reason = (
                f"a failed push has kept its slots of host memory for "
                f"{self._contention_timeout:g} s"
            )
            self._abort(self._pushes[request], "loads_failed_staging", reason)
        if self._staging_receiver is not None:
            # again: everything above may have freed slots
            self._give_room(self._staging_receiver, now)
        return earliest(
            self._deadlines.next(),
            self._lost_peers.next(),
            self._contention_deadlines.next() if self._is_contended else None,
            self._kept_slots.next(),
            *(answer_by for _, answer_by in self._awaited_peers() if answer_by > now),
        )

    @property
    def _is_contended(self) -> bool:
        """Whether a push waits for slots that others hold."""
        return self._staging_receiver is not None and bool(self._staging_receiver.slots.waiting)

    def _awaited_peers(self) -> list[tuple[Peer, float]]:
        """Return the peers that owe us an answer, and write to us, and by when they must answer."""
        peers = [self._peers.get(engine) for engine in self._by_engine]
        return [
            (peer, peer.unanswered_since + self._peer_timeout)
            for peer in peers
            if peer is not None and peer.unanswered_since is not None
        ]

    def _abort_all_of(self, peer: Peer) -> None:
        for request in list(self._by_engine.get(peer.engine, ())):
            if self._pushes[request].state in (ReceiveState.REGISTERED, ReceiveState.WAITING):
                self._abort(
                    self._pushes[request], "loads_failed_timeout", f"{peer.address} does not answer"
                )

    def take_results(self) -> list[LoadResult | BlocksReleased]:
        """Return what ended since the last call, in order."""
        results = self._results
        self._results = []
        return results

    def _register(self, push: ExpectedPush, peer: Peer) -> None:
        order = push.order
        registration = RegisterPush(
            order.request, order.remote_request, order.prompt, tuple(push.lent)
        )
        if not fits(registration):
            self._lease_renewer.release(order.request, order.engine)
            self._fail(
                push, "loads_failed_transfer", "its blocks cannot be named in one message to P"
            )
            return
        push.on(ReceiveEvent.REGISTERED)
        self._counters.count("registrations_sent")
        self._link.send(peer.conn, registration)

    def _expected_push(self, conn: ConnId, reader: RequestId) -> ExpectedPush | None:
        """Return the push that P answers; None if it is over or another peer's."""
        push = self._pushes.get(reader)
        peer = self._peers.find(conn)
        if push is None or peer is None or peer.engine != push.order.engine:
            self._counters.count("unknown_transfer_messages")
            return None
        return push

    def _on_push_done(
        self, conn: ConnId, reader: RequestId, sums: Sequence[RankSums], *, held: bool
    ) -> None:
        push = self._expected_push(conn, reader)
        if push is None:
            return
        push.sums = sums
        if push.state is ReceiveState.STOPPING:
            self._release(push)  # it had written everything when it heard that we do not want it
        elif push.state is ReceiveState.REGISTERED and held and self._staging_receiver is not None:
            push.on(ReceiveEvent.STAGED)
            self._clear_deadlines(push)
            self._lease_renewer.stop_renewing(reader, push.order.engine)
            slots, blocks = (
                [lent.blocks for lent in groups] for groups in (push.lent, push.order.groups)
            )
            self._staging_receiver.copy_in(reader, slots, blocks)
        elif push.state is ReceiveState.REGISTERED and held:
            self._succeed(push)
        elif push.state is ReceiveState.REGISTERED:
            self._counters.count("reads_discarded")
            self._fail(
                push, "loads_failed_lease", "its lease was over before everything was written"
            )

    def _on_copied_in(self, push: ExpectedPush, failure: str) -> None:
        if push.state is ReceiveState.ABORTING:
            self._release(push)
        elif failure:
            self._fail(
                push, "loads_failed_staging", f"it was not copied out of host memory: {failure}"
            )
        else:
            self._succeed(push)

    def _succeed(self, push: ExpectedPush) -> None:
        """The blocks hold KV.

        If P has sampled the prefill, our workers compare them before they count as loaded.
        """
        push.on(ReceiveEvent.DONE)
        if push.sums:
            token_ranges = [
                TokenRange(group, lent.start, lent.stop, (), lent.blocks)
                for group, lent in enumerate(push.order.groups)
                if lent.start < lent.stop
            ]
            self._end(push, "", LoadChecks(push.order.engine, push.sums, token_ranges))
            return
        self._counters.count_load("loads", push.order.engine)
        self._end(push, "")

    def _on_stopped(self, conn: ConnId, message: PushStopped) -> None:
        push = self._expected_push(conn, message.reader)
        if push is None:
            return
        if push.state is ReceiveState.STOPPING:
            self._release(push)
        elif push.state is ReceiveState.REGISTERED:
            counter = "loads_failed_lease" if message.lease_lost else "loads_failed_transfer"
            self._fail(push, counter, f"P stopped: {message.reason}")

    def _on_peer_lost(self, push: ExpectedPush, peer: Peer, now: float) -> None:
        # once: over a new connection it is registered at once
        if push.state is ReceiveState.WAITING:
            self._counters.count("registrations_resent")
            self._approach(push, now)
            return
        if push.state is ReceiveState.REGISTERED:
            reason = f"{peer.address} is gone: {peer.reason}"
            self._counters.count_load("loads_failed_peer", push.order.engine)
            self._lease_renewer.stop_renewing(push.order.request, push.order.engine)
            self._report(push, reason)
        push.on(ReceiveEvent.PEER_LOST)
        self._clear_deadlines(push)
        self._lost_peers.add(push.order.request, peer, push.order.address, now=now)

    def _ask_about_quarantined(self, peer: Peer) -> None:
        """Ask a P that is back for PushStopped."""
        requests = self._lost_peers.take_back(peer)
        for request in requests:
            self._pushes[request].on(ReceiveEvent.PEER_BACK)
        for names in by_message(requests):
            self._link.send(peer.conn, CancelPushes(names))

    def _abort(self, push: ExpectedPush, counter: str, reason: str) -> None:
        """End a push for a reason of ours, and cancel it at P."""
        order = push.order
        was = push.state
        if push.has_failed:
            return
        if was in (ReceiveState.QUEUED, ReceiveState.WAITING):
            self._lease_renewer.release(order.request, order.engine)
            self._fail(push, counter, reason)
            return
        self._counters.count_load(counter, order.engine)
        push.on(ReceiveEvent.ABORTED)
        self._clear_deadlines(push)
        self._report(push, reason)
        self._lease_renewer.release(order.request, order.engine)
        peer = self._peers.get(order.engine)
        if (
            was is ReceiveState.REGISTERED
            and peer is not None
            and peer.state is PeerState.CONNECTED
        ):
            self._link.send(peer.conn, CancelPushes((order.request,)))

    def _report(self, push: ExpectedPush, failure: str) -> None:
        """Report a failed push that P may still write into; a staged one has no such blocks yet."""
        quarantined = self._staging_receiver is None or push.state is ReceiveState.ABORTING
        self._results.append(LoadResult(push.order.request, failure, quarantined=quarantined))
        self._kept_slots.keep(push.order.request)

    def _release(self, push: ExpectedPush) -> None:
        if self._staging_receiver is None or push.state is ReceiveState.ABORTING:
            self._results.append(BlocksReleased(push.order.request))
        push.on(ReceiveEvent.RELEASED)
        self._forget(push)

    def _forget(self, push: ExpectedPush) -> None:
        order = push.order
        del self._pushes[order.request], self._by_engine[order.engine][order.request]
        if not self._by_engine[order.engine]:
            del self._by_engine[order.engine]
        self._awaiting_reply.get(order.engine, {}).pop(order.request, None)
        self._clear_deadlines(push)
        self._lost_peers.discard(order.request)
        self._kept_slots.forget(order.request)
        if self._staging_receiver is not None:
            self._staging_receiver.slots.release(order.request)

    def _clear_deadlines(self, push: ExpectedPush) -> None:
        """Clear all deadlines: only P's answer, or a copy's end, matters now."""
        self._deadlines.discard(push.order.request)
        self._contention_deadlines.discard(push.order.request)

    def _fail_unmet(self, push: ExpectedPush, peer: Peer) -> None:
        reason = f"{peer.address} was not met: {peer.reason}"
        self._fail(push, "loads_failed_handshake", reason, cause=peer.cause)

    def _fail(self, push: ExpectedPush, counter: str, reason: str, *, cause: str = "") -> None:
        push.on(ReceiveEvent.FAILED)
        self._counters.count_load(counter, push.order.engine, cause=cause)
        self._end(push, reason)

    def _end(self, push: ExpectedPush, failure: str, checks: LoadChecks | None = None) -> None:
        order = push.order
        self._forget(push)
        self._lease_renewer.stop_renewing(order.request, order.engine)
        self._results.append(LoadResult(order.request, failure, checks=checks))
