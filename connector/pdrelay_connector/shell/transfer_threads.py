"""The threads of a worker that move KV: one calls NIXL, others copy to and from host memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from pdrelay_connector.core.counters import Counters, ForwardingCounters, StatsReport
from pdrelay_connector.core.ids import EngineEndpoint, EngineId, RequestId
from pdrelay_connector.core.messages import WorkerHello
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.push.part_writer import PartWriteId
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.returning_writer import ReturningWriter
from pdrelay_connector.core.session.handshake import ProcessRole, badge_of
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.staging.slots import HostBuffer, OwnerT, Slots
from pdrelay_connector.core.staging.worker import StagingWorker
from pdrelay_connector.core.verify.sampling import Sampling
from pdrelay_connector.io.link import SocketLink
from pdrelay_connector.io.nixl import NixlTransferAgent, RemoteAgents
from pdrelay_connector.io.recovering_agent import RecoveringAgent
from pdrelay_connector.io.runner import CoreT, Runner
from pdrelay_connector.settings import Mode, Settings
from pdrelay_connector.shell.devices import binding
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.host_staging import StagingBuffer, ThreadCopier
from pdrelay_connector.shell.metadata import RankHandshake
from pdrelay_connector.shell.network import open_link
from pdrelay_connector.shell.registered_memory import RegisteredMemory, RoleMemory
from pdrelay_connector.shell.timeline_notes import are_wanted

ReaderThread: TypeAlias = Runner[PullReader] | Runner[ReturningWriter]
WriterThread: TypeAlias = Runner[PushWriter] | Runner[ReturningWriter]


@dataclass(slots=True)
class TransferThreads:
    """What runs while the memory is registered; without memory, nothing."""

    reader: ReaderThread | None = None  # in push with return_kv only
    writer: WriterThread | None = None  # only in push; where both are, they are one
    stager: Runner[StagingWorker] | None = None  # copies for other engines
    copiers: list[ThreadCopier] = field(default_factory=list[ThreadCopier])

    def check(self) -> None:
        """Raise :exc:`~pdrelay_connector.errors.ConnectorError` if a thread has died."""
        for thread in (self.reader, self.writer, self.stager):
            if thread is not None:
                thread.check()

    def stop(self) -> None:
        """End the threads."""
        for thread in (self.reader, self.writer, self.stager, *self.copiers):
            if thread is not None:  # one that reads and writes is stopped twice
                thread.stop()


class TransferThreadStarter:
    """Starts the threads of this engine's role, once for each registration."""

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: Settings,
        memory: RegisteredMemory,
        handshake: RankHandshake,
        *,
        engine: EngineId,
        counters: Counters,
        forward: Callable[[StatsReport], None],
        after_turn: Callable[[PullReader | ReturningWriter], None],
    ) -> None:
        """``engine``: this one in its present generation. ``counters``: of the thread that reads.

        ``forward`` gets the counts of the others, each on its own thread, before its next message.
        ``after_turn`` is called on the thread that reads.
        """
        self._engine_config = engine_config
        self._settings = settings
        self._memory = memory
        self._fingerprint = handshake.fingerprint
        self._token = handshake.token
        self._engine = engine
        self._counters = counters
        self._forward = forward
        self._after_turn = after_turn
        self._has_timelines = are_wanted()
        self._threads = TransferThreads()

    def start(self) -> TransferThreads:
        """Start them; each is bound to the device."""
        self._start_transfers()
        self._start_stager()
        return self._threads

    def _start_transfers(self) -> None:
        """Start the thread that makes all calls of NIXL from here on; it is bound to the device.

        Where an engine writes what it computes, and reads KV of earlier answers, one thread does
        both.
        """
        memory = self._memory
        mode = self._settings.mode
        writes = mode.pushes and self._engine_config.is_producer
        reads = (mode.pulls and self._engine_config.is_consumer) or (
            writes and bool(self._engine_config.prefix_hash)
        )
        if not (writes or reads):
            return
        link = self._link()
        remote_agents = RemoteAgents(memory.agent)
        movers = [
            NixlTransferAgent(memory.agent, memory.kind, memory.number, remote_agents)
            for _ in range(2)
        ]
        threads = self._threads
        writer = self._writer(link, movers[0], memory.producer) if writes else None
        reader = self._reader(link, movers[1], memory.consumer) if reads else None
        if writer is not None and reader is not None:
            threads.reader = threads.writer = self._transfer_thread(
                ReturningWriter(writer, reader), link, self._after_turn
            )
        elif writer is not None:
            threads.writer = self._transfer_thread(writer, link, lambda _: None)
        elif reader is not None:
            threads.reader = self._transfer_thread(reader, link, self._after_turn)

    def _reader(
        self,
        link: SocketLink,
        mover: NixlTransferAgent,
        memory: RoleMemory,
    ) -> PullReader:
        settings = self._settings
        peers = PeerTable(link, self._fingerprint, self._counters, retry_after=settings.retry_after)
        staging: HostBuffer[RequestId] | None = self._host_buffer(memory, link)
        return PullReader(
            link,
            self._recovering(mover, self._counters),
            peers,
            self._counters,
            memory.info,
            timeout=settings.transfer_timeout,
            staging=staging,
            cache=self._memory.cache,
        )

    def _transfer_thread(
        self, core: CoreT, link: SocketLink, after_turn: Callable[[CoreT], None]
    ) -> Runner[CoreT]:
        begin = binding(self._memory.device)
        runner = Runner("pdrelay-transfer", core, link, after_turn, begin=begin)
        runner.start()
        return runner

    def _writer(
        self,
        link: SocketLink,
        mover: NixlTransferAgent,
        memory: RoleMemory,
    ) -> PushWriter:
        timeout = self._settings.transfer_timeout
        staging: HostBuffer[PartWriteId] | None = self._host_buffer(memory, link)
        counters = ForwardingCounters(self._forward, keeps_events=self._has_timelines)
        return PushWriter(
            link,
            self._recovering(mover, counters),
            counters,
            memory.info,
            scheduler_endpoint=self._scheduler,
            token=self._token,
            timeout=timeout,
            staging=staging,
            sampling=Sampling(self._settings.verify_share, self._settings.verify_blocks),
            cache=self._memory.cache,
        )

    def _recovering(self, mover: NixlTransferAgent, counters: Counters) -> RecoveringAgent:
        timeout = self._settings.transfer_timeout
        return RecoveringAgent(mover, self._memory.replacement, counters, timeout=timeout)

    def _start_stager(self) -> None:
        """Start what copies for other engines, if any: P in pull, D in push."""
        receives_pushes = self._settings.mode is not Mode.PULL
        role = self._memory.consumer if receives_pushes else self._memory.producer
        if role.buffer is None:  # not this engine's role, or without host memory
            return
        link = self._link()
        stager = StagingWorker(
            link,
            self._copier(role.buffer, link),
            ForwardingCounters(self._forward, keeps_events=self._has_timelines),
            scheduler_endpoint=self._scheduler,
            hello=WorkerHello(role.info.worker, self._token, receives_pushes),
        )
        self._threads.stager = Runner("pdrelay-stager", stager, link)
        self._threads.stager.start()

    def _host_buffer(self, memory: RoleMemory, link: SocketLink) -> HostBuffer[OwnerT] | None:
        if (buffer := memory.buffer) is None:
            return None
        return HostBuffer(Slots[OwnerT](buffer.slots), self._copier(buffer, link))

    def _copier(self, buffer: StagingBuffer, link: SocketLink) -> ThreadCopier:
        copier = self._memory.copier(buffer, link.wake)
        self._threads.copiers.append(copier)
        copier.start()
        return copier

    @property
    def _scheduler(self) -> EngineEndpoint:
        """This engine's scheduler process."""
        return EngineEndpoint(self._engine, self._engine_config.address)

    def _link(self) -> SocketLink:
        return open_link(
            self._settings,
            self._engine,
            self._counters,
            role=ProcessRole.WORKER,
            badge=badge_of(self._token),
        )
