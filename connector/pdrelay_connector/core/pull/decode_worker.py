"""The decode worker in pull: reads blocks, and reports them only if the lease outlived the read.

A load waits for its peer, reads, asks P for the fence result, and ends. Its deadline covers all of
that. When the deadline passes the load fails at once, but its blocks stay quarantined until NIXL
has ended every read: a hung peer may write into them much later.

If NIXL cannot reach the cache of either engine, the load goes through host memory, part by part. It
gets slots of our host buffer first, then asks P to stage the part in P's, reads it, and copies it
into our cache. P's slots come last, and their holder waits for nothing else, so that loads cannot
deadlock.
"""

from collections import deque
from collections.abc import Sequence
from math import inf

from pdrelay_connector.core.counters import LOAD_OUTCOMES, Counters
from pdrelay_connector.core.deadlines import earliest
from pdrelay_connector.core.ids import BlockId, ConnId, RequestId
from pdrelay_connector.core.layout.parts import cut, most_blocks, of_rank
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import (
    DropLeases,
    FenceResult,
    PartRefused,
    PartStaged,
    RankInfo,
    RankSums,
    ReadDone,
    StagePart,
)
from pdrelay_connector.core.ports import (
    CacheReader,
    ConnectionLost,
    Link,
    LinkEvent,
    MessageReceived,
    TransferAgent,
)
from pdrelay_connector.core.pull.load import UNDER_WAY, Load, LoadEvent, LoadOrder, LoadState
from pdrelay_connector.core.results import BlocksReleased, LoadResult
from pdrelay_connector.core.session.peers import Peer, PeerState, PeerTable
from pdrelay_connector.core.staging.kept_slots import KeptSlots
from pdrelay_connector.core.staging.slots import HostBuffer, Slots
from pdrelay_connector.core.timeline import TimelineStep
from pdrelay_connector.core.transfer.remote_memory import RemoteEngines
from pdrelay_connector.core.transfer.transfers import (
    POLL_INTERVAL,
    QUARANTINE_POLL_INTERVAL,
    StepEnded,
    Transfers,
)
from pdrelay_connector.core.verify.comparison import compare, count
from pdrelay_connector.errors import ConnectorError, IllegalTransition

# times the timeout: P stages for others first, and for all of our ranks at once
STAGING_TIMEOUT_FACTOR = 4


class PullReader:
    """Runs on the transfer thread, which makes every call of NIXL."""

    def __init__(
        self,
        link: Link,
        transfer_agent: TransferAgent,
        peers: PeerTable,
        counters: Counters,
        own: RankInfo,
        *,
        timeout: float,
        staging: HostBuffer[RequestId] | None = None,
        cache: CacheReader | None = None,
    ) -> None:
        self._link = link
        self._peers = peers
        self._counters = counters
        self._own = own
        self._timeout = timeout
        self._staging = staging
        self._cache = cache  # absent: it cannot be read, and no load is compared
        self._groups = 1 + max(region.group for region in own.regions)
        self._remote_engines = RemoteEngines(transfer_agent, own)
        self._transfers = Transfers[RequestId](
            transfer_agent, staging.copier if staging is not None else None, counters
        )
        self._kept_slots = KeptSlots[RequestId](timeout)
        self._loads: dict[RequestId, Load] = {}
        self._results: list[LoadResult | BlocksReleased] = []

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, order: LoadOrder, *, now: float) -> None:
        """Start a load; its result comes out of :meth:`take_results`.

        ``timeout`` covers the whole load. A staged load has ``timeout`` for each step, and waits
        for slots as long as other loads use them.
        """
        if order.request in self._loads:
            raise IllegalTransition(f"request {order.request} is loaded twice")
        load = self._loads[order.request] = Load(order, deadline=now + self._timeout)
        self._counters.note(order.request, TimelineStep.LOAD_BEGUN, now)
        self._peers.ensure_connected(order.engine, order.address, now=now, is_offer=True)
        if self._staging is None:
            self._connect(load, now)
            return
        load.state = LoadState.QUEUED
        load.deadline = inf
        try:
            self._staging.slots.enqueue(order.request, most_blocks(order.token_ranges, self._own))
        except ConnectorError as exc:
            self._abort(load, "loads_failed_staging", str(exc), now)
        else:
            self._kept_slots.wait(order.request, now=now)
            self._start_granted(self._staging.slots, now)

    def _start_granted(self, slots: Slots[RequestId], now: float) -> None:
        """Start the loads that have their slots.

        A load keeps its slots to its end. Each rank has its own buffer: if loads released slots and
        requested new ones, two of them could deadlock, each with slots on one rank.
        """
        while granted := slots.take_granted():  # a load that fails at once frees slots for the next
            for request, its_slots in granted:
                load = self._loads[request]
                load.on(LoadEvent.SLOTS_GRANTED)
                load.slots = its_slots
                self._kept_slots.forget(request)
                load.deadline = now + self._timeout
                self._connect(load, now)

    def _connect(self, load: Load, now: float) -> None:
        """Begin if the peer is connected; else wait for the end of the handshake."""
        peer = self._peers.ensure_connected(load.order.engine, load.order.address, now=now)
        if peer.state is PeerState.CONNECTED:
            self._begin(load, now)
        elif peer.is_refused:
            self._fail_unmet(load, peer, now)
        else:
            load.meet_by = peer.patience_ends
            if now >= load.meet_by:
                self._time_out(load, now)

    def give_up(self, reason: str, *, now: float) -> None:
        """Fail all loads."""
        for load in list(self._loads.values()):
            self._abort_once(load, "loads_aborted", reason, now)

    @property
    def uses_memory(self) -> bool:
        """Whether something may still be read into this rank's memory."""
        return bool(self._loads)

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle an event of a connection that we opened."""
        match event:
            case MessageReceived(conn, FenceResult(reader, held, sums)):
                self._on_fence_result(conn, reader, sums, now, held=held)
            case MessageReceived(conn, PartStaged(reader, part, groups)):
                if (load := self._load_asking(conn, reader, part)) is not None:
                    self._read(load, _from_slots(load.parts[0], groups), now)
            case MessageReceived(conn, PartRefused(reader, part, reason)):
                if (load := self._load_asking(conn, reader, part)) is not None:
                    self._send_drop(load)
                    self._fail(load, "loads_failed_staging", f"it was not staged: {reason}", now)
            case MessageReceived(conn, _):
                self._link.close(conn)
                self._on_peer_changed(
                    self._peers.on(ConnectionLost(conn, "it broke the protocol"), now=now), now
                )
            case _:
                self._on_peer_changed(self._peers.on(event, now=now), now)

    def advance(self, *, now: float) -> float | None:
        """Poll NIXL and the copier and check deadlines; return when to call again at the latest."""
        for step in self._transfers.poll():
            self._on_step_ended(step, now)
        for load in [load for load in self._loads.values() if now >= load.due]:
            # the timeout of another load may have ended it with their peer
            if load.state is not LoadState.OVER:
                self._time_out(load, now)
        for request in self._kept_slots.take_overdue(now=now):
            reason = f"a failed load has kept its slots of host memory for {self._timeout:g} s"
            self._abort(self._loads[request], "loads_failed_staging", reason, now)
        if self._staging is not None:
            # last: everything above may have freed slots
            self._start_granted(self._staging.slots, now)
        self._peers.forget_refused(self._remote_engines, now=now)
        return earliest(
            self._kept_slots.next(), *(self._due(load, now) for load in self._loads.values())
        )

    def take_results(self) -> list[LoadResult | BlocksReleased]:
        """Return what has ended since the last call, in order."""
        results = self._results
        self._results = []
        return results

    def _due(self, load: Load, now: float) -> float:
        if load.state in UNDER_WAY:
            return now + POLL_INTERVAL
        return now + QUARANTINE_POLL_INTERVAL if load.state is LoadState.ABORTING else load.due

    # ---- the peer

    def _on_peer_changed(self, peer: Peer | None, now: float) -> None:
        if peer is None:
            return
        loads = [load for load in self._loads.values() if load.order.engine == peer.engine]
        # Loads that are ABORTING were connected before: NIXL decides when they end, not this
        # handshake.
        waiting = [load for load in loads if load.state is LoadState.WAITING]
        if peer.state is PeerState.CONNECTED:
            self._attach(peer, now)
        if peer.state is PeerState.CONNECTED:
            for load in waiting:
                self._counters.note(load.order.request, TimelineStep.PEER_MET, now)
                self._begin(load, now)
        elif peer.is_refused:
            for load in waiting:
                self._fail_unmet(load, peer, now)
        elif peer.state is PeerState.GONE:
            for load in loads:
                self._abort_once(
                    load, "loads_failed_peer", f"{peer.address} is gone: {peer.reason}", now
                )
            self._remote_engines.detach(peer.engine)

    def _attach(self, peer: Peer, now: float) -> None:
        """Make a peer's memory readable, or refuse the peer."""
        try:
            self._remote_engines.attach(peer.engine, peer.ranks)
        except ConnectorError as exc:
            self._link.close(peer.conn)
            self._peers.refuse(peer, str(exc), now=now)

    # ---- one part

    def _begin(self, load: Load, now: float) -> None:
        token_ranges = of_rank(load.order.token_ranges, self._own)
        load.parts = deque(
            cut(token_ranges, self._own, self._remote_engines[load.order.engine].theirs)
        )
        self._read_next_part(load, now)

    def _read_next_part(self, load: Load, now: float) -> None:
        """Read the next part, or have P stage it; after the last part, request the fence result."""
        order = load.order
        own = self._own
        theirs = self._remote_engines[load.order.engine].theirs
        if not load.parts:
            load.on(LoadEvent.READ)
            self._counters.note(order.request, TimelineStep.READ, now)
            self._extend(load, now)
            self._send(load, ReadDone(order.remote_request, order.request, own.worker, own.workers))
            return
        if not theirs.staged:
            self._read(load, load.parts[0], now)
            return
        load.on(LoadEvent.ASKED)
        load.deadline = now + STAGING_TIMEOUT_FACTOR * self._timeout
        blocks = sum(len(tokens.local) for tokens in load.parts[0])
        self._counters.note(order.request, TimelineStep.STAGING, now, blocks)
        groups: list[tuple[BlockId, ...]] = [()] * self._groups
        for tokens in load.parts[0]:
            groups[tokens.group] = tuple(tokens.remote)
        self._send(
            load,
            StagePart(
                order.remote_request, order.request, own.rank, own.ranks, load.number, tuple(groups)
            ),
        )

    def _extend(self, load: Load, now: float) -> None:
        """Extend the deadline of a staged load; any other load has one deadline from its start."""
        if self._staging is not None or self._remote_engines[load.order.engine].theirs.staged:
            load.deadline = now + self._timeout

    def _load_asking(self, conn: ConnId, request: RequestId, part: int) -> Load | None:
        """Return the load that P answers; None: aborted, or of another peer."""
        load = self._load_of(conn, request)
        return (
            load
            if load is not None and load.state is LoadState.ASKING and load.number == part
            else None
        )

    def _read(self, load: Load, part: Sequence[TokenRange], now: float) -> None:
        if self._staging is not None:
            part = [
                token_range._replace(local=load.slots[token_range.group][: len(token_range.local)])
                for token_range in part
            ]
        try:
            spans = self._remote_engines[load.order.engine].spans(part)
            self._transfers.read(load.order.request, spans, peer=load.order.engine)
        except ConnectorError as exc:
            self._abort(load, "loads_failed_transfer", str(exc), now, LoadEvent.STARTED)
        else:
            load.on(LoadEvent.STARTED)
            self._counters.note(
                load.order.request,
                TimelineStep.READING,
                now,
                sum(len(token_range.local) for token_range in part),
            )
            self._extend(load, now)
            if not spans:  # other ranks of ours have all of these tokens
                self._finish_part(load, now)

    def _on_step_ended(self, step: StepEnded[RequestId], now: float) -> None:
        load = self._loads[step.owner]
        is_active = self._transfers.is_active(step.owner)
        if load.state is LoadState.ABORTING:
            if not is_active:
                self._release(load)
        elif step.failure and step.is_copy:
            reason = f"it was not copied out of host memory: {step.failure}"
            self._abort(load, "loads_failed_staging", reason, now)
        elif step.failure:
            self._abort(load, "loads_failed_transfer", step.failure, now)
        elif step.is_copy:
            self._counters.count("bytes_staged_in", step.copied_bytes)
            self._finish_part(load, now)
        elif not is_active and self._staging is not None:
            self._copy_in(load, self._staging, now)
        elif not is_active:
            self._finish_part(load, now)

    def _copy_in(self, load: Load, staging: HostBuffer[RequestId], now: float) -> None:
        """Copy a part from our host buffer into the cache."""
        load.on(LoadEvent.FETCHED)
        blocks: list[Sequence[BlockId]] = [()] * self._groups
        for tokens in load.parts[0]:
            blocks[tokens.group] = tokens.local
        slots = [its[: len(ids)] for its, ids in zip(load.slots, blocks, strict=True)]
        self._transfers.add_copy(load.order.request, staging.copier.into(slots, blocks))
        load.deadline = now + self._timeout

    def _finish_part(self, load: Load, now: float) -> None:
        load.parts.popleft()
        load.number += 1
        self._read_next_part(load, now)

    # ---- the end

    def _on_fence_result(
        self, conn: ConnId, request: RequestId, sums: RankSums | None, now: float, *, held: bool
    ) -> None:
        load = self._load_of(conn, request)
        if load is None or load.state is not LoadState.CONFIRMING:
            return  # aborted before, or another peer's
        if not held:
            self._counters.count("reads_discarded")
            self._fail(load, "loads_failed_lease", "its lease was over before the read ended", now)
        elif failure := self._mismatch(load, sums):
            self._fail(load, "loads_failed_wrong_kv", failure, now)
        else:
            load.on(LoadEvent.CONFIRMED)
            self._counters.count("loads")
            self._counters.note(request, TimelineStep.LOADED, now)
            self._end(load, "")

    def _mismatch(self, load: Load, sums: RankSums | None) -> str:
        """Return how blocks differ from P's checksums; empty: they do not."""
        if sums is None:
            return ""
        comparison = compare(sums, load.order.token_ranges, self._cache)
        count(comparison, self._counters)
        return comparison.failure

    def _load_of(self, conn: ConnId, request: RequestId) -> Load | None:
        load = self._loads.get(request)
        peer = self._peers.find(conn)
        return (
            load
            if load is not None and peer is not None and peer.engine == load.order.engine
            else None
        )

    def _time_out(self, load: Load, now: float) -> None:
        """Abort a load, and disconnect a peer that hangs in the middle of it."""
        peer = self._peers.get(load.order.engine)
        if load.state is LoadState.WAITING and now < load.deadline:
            reason = f"{load.order.address} was not met: it does not answer, and did not before"
            self._fail(load, "loads_failed_handshake", reason, now)
            return
        is_hung = load.state in (LoadState.READING, LoadState.CONFIRMING)
        self._abort_once(
            load, "loads_failed_timeout", f"not loaded within {self._timeout:g} s", now
        )
        if is_hung and peer is not None and peer.state is PeerState.CONNECTED:
            self._peers.disconnect(peer, "it does not answer")
            self._on_peer_changed(peer, now)

    def _abort_once(self, load: Load, counter: str, reason: str, now: float) -> None:
        if load.state is not LoadState.ABORTING:
            self._abort(load, counter, reason, now)

    def _abort(
        self, load: Load, counter: str, reason: str, now: float, before: LoadEvent | None = None
    ) -> None:
        """Fail a load.

        Quarantine its blocks if something may still write into them; ``before`` happened first.
        """
        self._send_drop(load)
        if not self._transfers.is_active(load.order.request):
            self._fail(load, counter, reason, now)
            return
        if before is not None:
            load.on(before)
        load.on(LoadEvent.CANCELLED)
        load.deadline = inf
        self._transfers.cancel(load.order.request)
        self._count_failure(load, counter, now)
        self._results.append(LoadResult(load.order.request, reason, quarantined=True))
        self._kept_slots.keep(load.order.request)

    def _release(self, load: Load) -> None:
        """End the quarantine of an aborted load's blocks."""
        load.on(LoadEvent.RELEASED)
        self._forget(load)
        self._results.append(BlocksReleased(load.order.request))

    def _fail_unmet(self, load: Load, peer: Peer, now: float) -> None:
        reason = f"{peer.address} was not met: {peer.reason}"
        self._fail(load, "loads_failed_handshake", reason, now, cause=peer.cause)

    def _fail(self, load: Load, counter: str, reason: str, now: float, *, cause: str = "") -> None:
        load.on(LoadEvent.FAILED)
        self._count_failure(load, counter, now, cause=cause)
        self._end(load, reason)

    def _count_failure(self, load: Load, counter: str, now: float, *, cause: str = "") -> None:
        self._counters.count_load(counter, load.order.engine, cause=cause)
        self._counters.note(
            load.order.request,
            TimelineStep.LOAD_FAILED,
            now,
            note=cause or LOAD_OUTCOMES.get(counter, ""),
        )

    def _end(self, load: Load, failure: str) -> None:
        self._forget(load)
        self._results.append(LoadResult(load.order.request, failure))

    def _forget(self, load: Load) -> None:
        del self._loads[load.order.request]
        self._kept_slots.forget(load.order.request)
        if self._staging is not None:
            self._staging.slots.release(load.order.request)

    def _send_drop(self, load: Load) -> None:
        self._send(load, DropLeases((load.order.remote_request,)))

    def _send(self, load: Load, message: StagePart | ReadDone | DropLeases) -> None:
        peer = self._peers.get(load.order.engine)
        if peer is not None and peer.state is PeerState.CONNECTED:
            self._link.send(peer.conn, message)


def _from_slots(
    part: Sequence[TokenRange], groups: Sequence[Sequence[BlockId]]
) -> list[TokenRange]:
    """Replace P's blocks by the slots that P has staged them in."""
    return [
        tokens._replace(remote=groups[tokens.group] if tokens.group < len(groups) else ())
        for tokens in part
    ]
