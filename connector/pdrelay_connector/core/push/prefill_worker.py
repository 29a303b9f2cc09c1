"""The prefill worker in push: writes blocks into decode engines as they are computed.

The engine reports computed blocks step by step. The scheduler process reports registrations over a
connection of its own, so neither waits for an engine step. Whichever comes first waits here for the
other.

Only complete blocks are written; a later step completes the others. A state, which every step
changes, is written with the last part. A preempted prefill starts again as another ``attempt``,
which overwrites what the first one wrote, after its writes have ended.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import lcm

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.deadlines import earliest
from pdrelay_connector.core.ids import BlockId, ConnId, EngineEndpoint, RequestId
from pdrelay_connector.core.layout.parts import block_sizes, cut
from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.core.layout.source_ranks import shared_regions
from pdrelay_connector.core.layout.transfer_plan import TokenRange, push_route
from pdrelay_connector.core.messages import (
    MAX_REASON,
    LentBlocks,
    Message,
    PeerGone,
    PeerMemory,
    PushAborted,
    PushWritten,
    RankInfo,
    RankSums,
    StartPush,
    StopPush,
    WorkerHello,
    WriteStalled,
)
from pdrelay_connector.core.ports import (
    CacheReader,
    Link,
    LinkEvent,
    MessageReceived,
    TransferAgent,
)
from pdrelay_connector.core.push.part_writer import PartWriteEnded, PartWriteId, PartWriter
from pdrelay_connector.core.push.push_job import (
    ComputedBlocks,
    DecodeTarget,
    PromptBlocks,
    PushJob,
    PushJobEvent,
    PushJobState,
    TransferOver,
)
from pdrelay_connector.core.session.scheduler_link import SchedulerLink
from pdrelay_connector.core.staging.slots import HostBuffer
from pdrelay_connector.core.timeline import TimelineStep
from pdrelay_connector.core.transfer.remote_memory import RemoteRank
from pdrelay_connector.core.transfer.transfers import POLL_INTERVAL
from pdrelay_connector.core.verify.comparison import sums_of
from pdrelay_connector.core.verify.sampling import Sampling
from pdrelay_connector.errors import ConnectorError


class PushWriter:
    """Runs on the transfer thread, which makes every call of NIXL."""

    def __init__(
        self,
        link: Link,
        transfer_agent: TransferAgent,
        counters: Counters,
        own: RankInfo,
        *,
        scheduler_endpoint: EngineEndpoint,
        token: bytes,
        timeout: float,
        staging: HostBuffer[PartWriteId] | None = None,
        sampling: Sampling | None = None,
        cache: CacheReader | None = None,
    ) -> None:
        self._link = link
        self._transfer_agent = transfer_agent
        self._counters = counters
        self._own = own
        self._block_sizes = block_sizes(own)
        # the groups that keep one
        self._states = {region.group for region in own.regions if region.state}
        self._scheduler = SchedulerLink(link, scheduler_endpoint, WorkerHello(own.worker, token))
        self._timeout = timeout
        self._sampling = sampling  # absent, as is the cache: no checksums are taken
        self._cache = cache
        self._part_writer = PartWriter(transfer_agent, counters, timeout=timeout, staging=staging)
        self._sources: dict[RequestId, PromptBlocks] = {}
        self._peers: dict[ConnId, DecodeTarget] = {}
        self._jobs: dict[tuple[ConnId, RequestId], PushJob] = {}
        # the same, by the name of the transfer
        self._by_request: dict[RequestId, list[PushJob]] = {}
        self._by_part: dict[PartWriteId, PushJob] = {}
        self._awaiting_device: deque[tuple[ComputedBlocks | TransferOver, Callable[[], bool]]] = (
            deque()
        )

    def __len__(self) -> int:
        return len(self._sources) + len(self._jobs) + len(self._peers)

    def add_computed(
        self,
        event: ComputedBlocks | TransferOver,
        *,
        now: float,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Add computed blocks; ``ready`` returns whether the device has finished writing them."""
        if ready is None and not self._awaiting_device:
            self._accept(event, now)
        else:
            self._awaiting_device.append((event, ready or (lambda: True)))

    def give_up(self, reason: str, *, now: float) -> None:  # noqa: ARG002 -- as the reader does
        """Stop all pushes."""
        for job in list(self._jobs.values()):
            self._stop(job, reason)

    @property
    def uses_memory(self) -> bool:
        """Whether something may still be written from this rank's memory."""
        return bool(len(self._part_writer))

    def owns(self, conn: ConnId) -> bool:
        """Whether a connection is the one to our scheduler: only it may order writes."""
        return self._scheduler.owns(conn)

    def on(self, event: LinkEvent, *, now: float) -> None:
        """Handle an event of the connection to our scheduler."""
        match event:
            case MessageReceived(_, message):
                self._on_message(message, now)
            case _ if self._scheduler.on(event, now=now):
                self._on_scheduler_lost()
            case _:
                pass

    def advance(self, *, now: float) -> float | None:
        """Look at NIXL and at the clock; return when to be called again at the latest."""
        call_at = self._scheduler.advance(now=now)
        while self._awaiting_device and self._awaiting_device[0][1]():
            self._accept(self._awaiting_device.popleft()[0], now)
        for ended in self._part_writer.advance(now=now):
            self._on_part_ended(ended, now)
        for part in self._part_writer.overdue(now=now):
            self._stall(self._by_part[part])
        return earliest(
            call_at,
            now + POLL_INTERVAL if self._awaiting_device else None,
            self._part_writer.due(now=now),
        )

    def _on_scheduler_lost(self) -> None:
        """Handle the loss of our scheduler: the engine ends, or it reconnects and orders anew."""
        self._counters.count("peers_lost")
        for job in self._jobs.values():
            job.is_forgotten = True
        for peer in list(self._peers):
            self._forget_peer(peer)

    def _on_message(self, message: Message, now: float) -> None:
        match message:
            case PeerMemory(peer, rank, engine):
                self._attach(self._peers.setdefault(peer, DecodeTarget(engine)), rank)
            case StartPush(peer, order) if (
                peer in self._peers and (peer, order.reader) not in self._jobs
            ):
                job = self._jobs[peer, order.reader] = PushJob(peer, order)
                self._by_request.setdefault(order.request, []).append(job)
                self._write_computed(job, now)
            case StartPush(peer, order) if (peer, order.reader) in self._jobs:
                # our scheduler is back and waits for its end
                self._jobs[peer, order.reader].is_forgotten = False
            case StopPush(peer, reader) if (peer, reader) in self._jobs:
                self._jobs[peer, reader].is_forgotten = False
                self._stop(self._jobs[peer, reader], "")
            case StopPush(peer, reader):  # our scheduler may have lost what we said of its end
                self._scheduler.send(PushAborted(peer, reader, ""))
            case PeerGone(peer) if peer in self._peers:
                self._forget_peer(peer)
            case _:
                self._counters.count("unknown_transfer_messages")

    def _attach(self, peer: DecodeTarget, theirs: RankInfo) -> None:
        try:
            check_shapes(self._own, theirs)
            if theirs.worker in peer.remote_ranks or not shared_regions(self._own, theirs):
                return
            peer.rank = theirs
            peer.block_sizes |= block_sizes(theirs)
            if route := push_route(self._own, theirs):
                handle = self._transfer_agent.attach(theirs)
                peer.remote_ranks[theirs.worker] = RemoteRank(handle, route)
        except ConnectorError as exc:
            self._counters.count("handshakes_failed")
            peer.objection = str(exc)

    def _accept(self, event: ComputedBlocks | TransferOver, now: float) -> None:
        match event:
            case ComputedBlocks():
                self._add(event, now)
            case TransferOver(request):
                self._sources.pop(request, None)
                for job in list(self._by_request.get(request, ())):
                    if job.posted or job.parts:  # else it waits for the name's next use
                        self._stop(job, "the prefill engine does not hold the blocks any more")

    def _add(self, piece: ComputedBlocks, now: float) -> None:
        source = self._sources.get(piece.request)
        if source is None or source.attempt != piece.attempt:
            groups: list[list[BlockId]] = [[] for _ in piece.groups]
            source = self._sources[piece.request] = PromptBlocks(
                piece.prompt, piece.attempt, groups, piece.zeroed
            )
        for earlier, new in zip(source.groups, piece.groups, strict=True):
            earlier += new
        source.tokens = piece.tokens
        source.complete = piece.last
        for job in list(self._by_request.get(piece.request, ())):
            self._write_computed(job, now)

    def _forget_peer(self, peer: ConnId) -> None:
        for job in [w for w in self._jobs.values() if w.peer == peer]:
            self._stop(job, "the decode engine is gone")
        for remote_rank in self._peers.pop(peer).remote_ranks.values():
            self._transfer_agent.detach(remote_rank.handle)

    def _write_computed(self, job: PushJob, now: float) -> None:
        """Write what is computed and not written yet; report when all is written.

        A push is complete only when its prefill is: until then vLLM may preempt the prefill, and
        give its blocks to another request.
        """
        source = self._sources.get(job.order.request)
        if job.is_over or source is None:
            return
        if reason := self._objection(job, source):
            self._stop(job, reason)
            return
        if job.attempt != source.attempt:
            if job.parts:
                return  # writes of the earlier attempt must not arrive after those of this one
            job.attempt = source.attempt
            job.posted = 0
        until = self._writable(job, source)
        if job.posted < until:
            self._post(job, source, until, now)
        self._complete_if_written(job, source, now)

    def _complete_if_written(self, job: PushJob, source: PromptBlocks, now: float) -> None:
        if job.is_over or not source.complete or job.parts:
            return
        job.on(PushJobEvent.COMPLETED)
        self._counters.count("pushes")
        self._counters.note(job.order.request, TimelineStep.WRITTEN, now)
        self._end(job, PushWritten(job.peer, job.order.reader, self._sums(job, source)))

    def _sums(self, job: PushJob, source: PromptBlocks) -> RankSums | None:
        """Take checksums of a sampled transfer's written blocks: the lease still holds them."""
        order = job.order
        sampling = self._sampling
        cache = self._cache
        if sampling is None or cache is None or not sampling.takes(order.request):
            return None
        self._counters.count("prefills_sampled")
        blocks = sampling.choose(
            order.request,
            source.groups,
            sizes=self._block_sizes,
            states=self._states,
            tokens=source.tokens,
            lent=order.groups,
        )
        return sums_of(self._own.worker, blocks, cache)

    def _writable(self, job: PushJob, source: PromptBlocks) -> int:
        """Return up to which token whole blocks, ours and the decode engine's, can be written."""
        wanted_tokens = max(lent.stop for lent in job.order.groups)
        if source.complete:
            return wanted_tokens
        step = lcm(*self._block_sizes.values(), *self._peers[job.peer].block_sizes.values())
        # a state belongs to the last part
        computed = min(source.tokens, wanted_tokens - 1) if self._states else source.tokens
        return computed // step * step

    def _objection(self, job: PushJob, source: PromptBlocks) -> str:
        order = job.order
        wanted_tokens = max(lent.stop for lent in job.order.groups)
        if self._peers[job.peer].objection:
            return self._peers[job.peer].objection
        if order.prompt is None and source.prompt is not None:
            return f"transfer {order.request} was registered without its prompt's digest"
        if order.prompt != source.prompt:
            return f"transfer {order.request} belongs to another prompt"
        if len(order.groups) != len(source.groups):
            return (
                f"it registers {len(order.groups)} KV cache groups, there are {len(source.groups)}"
            )
        if source.complete and source.tokens < wanted_tokens:
            return (
                f"transfer {order.request} has {source.tokens} tokens, {wanted_tokens} are wanted"
            )
        if self._states and source.complete and source.tokens != wanted_tokens:
            return (
                f"transfer {order.request} has a state after {source.tokens} tokens, one after "
                f"{wanted_tokens} is wanted"
            )
        return ""

    def _post(self, job: PushJob, source: PromptBlocks, until: int, now: float) -> None:
        """Write everything from where we were to ``until``."""
        peer = self._peers[job.peer]
        start = job.posted
        job.posted = until
        self._counters.note(job.order.request, TimelineStep.WRITING, now, until)
        if peer.rank is None or not peer.remote_ranks:
            return  # other ranks of ours keep the same heads
        sizes = self._block_sizes
        theirs = peer.block_sizes
        token_ranges = [
            _state(group, lent, until, source.groups[group])
            if group in self._states
            else _lent_tokens(group, lent, source, sizes[group]).part(
                max(lent.start, start),
                min(lent.stop, until),
                remote_size=theirs[group],
                local_size=sizes[group],
            )
            for group, lent in enumerate(job.order.groups)
            if group in sizes and group in theirs  # a pipeline stage may have no layer of a group
        ]
        try:
            for part in cut(
                [
                    token_range
                    for token_range in token_ranges
                    if token_range.start < token_range.stop
                ],
                self._own,
                peer.rank,
            ):
                number = self._part_writer.write(
                    tuple(peer.remote_ranks.values()), part, engine=peer.engine, now=now
                )
                job.parts.add(number)
                self._by_part[number] = job
        except ConnectorError as exc:
            self._stop(job, str(exc))

    def _on_part_ended(self, ended: PartWriteEnded, now: float) -> None:
        job = self._by_part.pop(ended.part)
        job.parts.discard(ended.part)
        if job.state is PushJobState.STOPPING:
            self._finish_stop(job)
        elif ended.failure:
            self._stop(job, ended.failure)
        else:
            self._write_computed(job, now)

    def _stall(self, job: PushJob) -> None:
        if job.state is not PushJobState.OPEN:
            return
        reason = f"a write did not end within {self._timeout:g} s"
        if not job.is_forgotten:
            self._scheduler.send(WriteStalled(job.peer, job.order.reader, reason))
        self._stop(job, reason)

    def _stop(self, job: PushJob, reason: str) -> None:
        if job.state is PushJobState.STOPPING:
            self._finish_stop(job)
            return
        job.on(PushJobEvent.STOPPED)
        job.reason = reason
        for part in list(job.parts):
            self._part_writer.cancel(part, reason)
        self._finish_stop(job)

    def _finish_stop(self, job: PushJob) -> None:
        if job.parts:
            return
        job.on(PushJobEvent.DRAINED)
        self._counters.count("pushes_aborted")
        self._end(job, PushAborted(job.peer, job.order.reader, job.reason[:MAX_REASON]))

    def _end(self, job: PushJob, event: PushWritten | PushAborted) -> None:
        del self._jobs[job.peer, job.order.reader]
        self._by_request[job.order.request].remove(job)
        if not self._by_request[job.order.request]:
            del self._by_request[job.order.request]
        if not job.is_forgotten:
            self._scheduler.send(event)


def _lent_tokens(group: int, lent: LentBlocks, source: PromptBlocks, size: int) -> TokenRange:
    """Return the tokens of a group for which blocks are lent; ``size``: tokens of our blocks."""
    own = source.groups[group][lent.start // size :]
    whole = group in source.zeroed
    return TokenRange(group, lent.start, lent.stop, lent.blocks, own, whole)


def _state(group: int, lent: LentBlocks, until: int, blocks: Sequence[BlockId]) -> TokenRange:
    """Return the state of a group with the last part of a push, and nothing with any other part."""
    return TokenRange(group, min(lent.start, until), min(lent.stop, until), lent.blocks, blocks)
