"""The half in each vLLM worker: registers the cache, and passes loads to the transfer thread.

Everything here runs on the forward thread and only touches queues; NIXL is the transfer thread's.
"""

import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from xpyd_connector.core.counters import Report, Tally, Telling
from xpyd_connector.core.ids import EngineAt, RequestId
from xpyd_connector.core.messages import Attend, Fingerprint
from xpyd_connector.core.pull.decode_worker import Reader
from xpyd_connector.core.pull.load import Order
from xpyd_connector.core.push.prefill_worker import Writer
from xpyd_connector.core.push.push_job import Gone, Piece
from xpyd_connector.core.results import LetGo, Result
from xpyd_connector.core.session.handshake import GuestRole, badge_of
from xpyd_connector.core.session.peers import PeerBook
from xpyd_connector.core.staging.host_buffer import Staging
from xpyd_connector.core.staging.slots import Slots
from xpyd_connector.core.staging.worker import Stager
from xpyd_connector.core.transfer.transfers import ParcelId
from xpyd_connector.errors import ConnectorError
from xpyd_connector.io.link import SocketLink
from xpyd_connector.io.nixl import NixlMover, make_agent
from xpyd_connector.io.runner import Command, Runner
from xpyd_connector.settings import Mode
from xpyd_connector.shell.cache_regions import Interior
from xpyd_connector.shell.devices import Ready, computed
from xpyd_connector.shell.engine_config import Facts
from xpyd_connector.shell.host_staging import CopyRows, StagingBuffer, ThreadCopier
from xpyd_connector.shell.metadata import LingeringMetadata, RankHandshake, StepMetadata
from xpyd_connector.shell.network import bind_data_plane, open_link
from xpyd_connector.shell.outbox import Outbox
from xpyd_connector.shell.registered_memory import Half, Memory
from xpyd_connector.shell.vllm_stats import XpydStats

if TYPE_CHECKING:
    from xpyd_connector.settings import Settings

logger = init_logger("vllm.xpyd")

TOKEN_BYTES = 32


class WorkerSide:
    """vLLM's worker hooks."""

    def __init__(self, facts: Facts, settings: "Settings", rank: int) -> None:
        self._facts = facts
        self._settings = settings
        self._rank = rank
        self._handshake: RankHandshake | None = None  # absent until the cache exists
        self._memory: Memory | None = None  # likewise
        self._runner: Runner[Reader] | None = None  # only where KV is read
        self._writer: Runner[Writer] | None = None  # only where KV is written
        self._others: list[Runner[Any] | ThreadCopier] = []  # what else is to be stopped at the end
        self._arrived: list[Result] = []
        self._outbox: Outbox[Result | LetGo] = Outbox()
        self._lingering = LingeringMetadata()  # news for the scheduler
        self._tally = Tally()
        self._loading: set[RequestId] = set()
        self._idle = False

    def register(self, caches: Mapping[str, torch.Tensor], fingerprint: Fingerprint, interior: Interior) -> None:
        """Make the KV cache, or a host buffer, reachable for peers, and start what this engine's role needs."""
        bind_data_plane(self._settings, self._facts.address)
        agent = make_agent(
            str(uuid.uuid4()),
            progress_delay_us=self._settings.progress_delay_us,
            backends={backend.name: backend.parameters for backend in self._settings.backends},
        )
        self._agent = agent  # who only lets others read or write does nothing more with it, but it must live
        memory = self._memory = Memory(agent, self._facts, self._rank, caches, interior)
        lending, borrowing = memory.lending, memory.borrowing
        self._handshake = RankHandshake(lending.info, borrowing.info, fingerprint, os.urandom(TOKEN_BYTES))
        logger.info(
            "xpyd: rank %d registered %d layers of %d blocks, %.3f GB of %s%s",
            self._rank, len(caches), lending.info.regions[0].blocks, memory.gigabytes, memory.kind,
            " that KV goes through" if self._facts.staging_blocks else "",
        )  # fmt: skip
        mover = NixlMover(agent, memory.kind, memory.number)
        pulls = self._settings.mode is Mode.PULL
        if pulls and self._facts.borrows:
            self._start_reader(mover, borrowing, fingerprint)
        elif not pulls and self._facts.lends:
            self._start_writer(mover, lending, self._handshake.token)
        if pulls and self._facts.lends and lending.buffer is not None:
            self._start_stager(lending.buffer, Attend(self._rank, self._handshake.token))
        elif not pulls and self._facts.borrows and borrowing.buffer is not None:
            self._start_stager(borrowing.buffer, Attend(self._rank, self._handshake.token, unpacks=True))

    def use_copy_operation(self, copy_rows: CopyRows) -> None:
        """Copy between device and host as vLLM does on this platform."""
        if self._memory is not None:
            self._memory.use(copy_rows)

    def handshake(self) -> RankHandshake | None:
        """Return what peers must know of this rank."""
        return self._handshake

    def load(self, step: StepMetadata) -> None:
        """Pass this step's orders to the transfer thread."""
        self._idle = step.idle
        for order in step.orders:
            if self._runner is None:
                raise RuntimeError(f"request {order.request} is to be loaded on an engine that takes no KV over")
            self._loading.add(order.request)
            self._runner.post(_loading(order))
        self._arrived += step.arrived

    def offer(self, pieces: list[Piece | Gone]) -> None:
        """Let the transfer thread write what earlier steps have computed, once the device has."""
        if not pieces:
            return
        if self._writer is None:
            raise ConnectorError("KV is to be pushed by an engine that lends none")
        ready = computed(self._memory.device) if self._memory is not None else None
        for piece in pieces:
            self._writer.post(_offering(piece, ready))

    def results(self) -> KVConnectorTransferResults:
        """Return the loads that ended.

        A step that computes nothing while loads are under way waits a moment for one: vLLM would otherwise step
        at full speed, on the core that the transfer needs.
        """
        if self._loading and self._runner is not None:
            self._runner.check()
        if self._loading and self._idle and self._facts.steps_alone and not self._outbox:
            self._outbox.wait(self._settings.idle_wait)
        if self._writer is not None:
            self._writer.check()
        results = KVConnectorTransferResults()
        for ended in self._outbox.take():
            match ended:
                case LetGo(request):
                    self._lingering.let_go.append(request)
                case Result(request, _, lingers):
                    self._loading.discard(request)
                    _report(results, ended)
                    if lingers:
                        self._lingering.lingers.append(request)
        for result in self._arrived:
            _report(results, result)  # blocks that linger are the scheduler's own business here
        self._arrived = []
        return results

    def lingering(self) -> LingeringMetadata | None:
        """Return whose blocks must be kept from others, and whose no longer, since the last call."""
        news, self._lingering = self._lingering, LingeringMetadata()
        return news if news.lingers or news.let_go else None

    def stats(self) -> XpydStats | None:
        """Return the numbers since the last call."""
        report = self._outbox.take_report()
        return XpydStats.of(report) if report else None

    def stop(self) -> None:
        """End the transfer thread."""
        for runner in (self._runner, self._writer, *self._others):
            if runner is not None:
                runner.stop()

    def _start_reader(self, mover: NixlMover, half: Half, fingerprint: Fingerprint) -> None:
        settings, link = self._settings, self._link()
        peers = PeerBook(link, fingerprint, self._tally, retry_after=settings.retry_after)
        staging: Staging[RequestId] | None = None
        if half.buffer is not None:
            staging = Staging(Slots[RequestId](half.buffer.slots), self._copier(half.buffer, link))
        reader = Reader(link, mover, peers, self._tally, half.info, timeout=settings.transfer_timeout, staging=staging)
        self._runner = Runner("xpyd-transfer", reader, link, self._after_turn)
        self._runner.start()

    def _start_writer(self, mover: NixlMover, half: Half, token: bytes) -> None:
        link, timeout = self._link(), self._settings.transfer_timeout
        staging: Staging[ParcelId] | None = None
        if half.buffer is not None:
            staging = Staging(Slots[ParcelId](half.buffer.slots), self._copier(half.buffer, link))
        tally = Telling(self._tell)
        writer = Writer(link, mover, tally, half.info, home=self._home, token=token, timeout=timeout, staging=staging)
        self._writer = Runner("xpyd-transfer", writer, link)
        self._writer.start()

    def _start_stager(self, buffer: StagingBuffer, attend: Attend) -> None:
        link, tally = self._link(), Telling(self._tell)
        stager = Stager(link, self._copier(buffer, link), tally, home=self._home, attend=attend)
        runner = Runner("xpyd-stager", stager, link)
        self._others.append(runner)
        runner.start()

    def _copier(self, buffer: StagingBuffer, link: SocketLink) -> ThreadCopier:
        if self._memory is None:
            raise RuntimeError("copies need the cache to be registered first")
        copier = self._memory.copier(buffer, link.wake)
        self._others.append(copier)
        copier.start()
        return copier

    @property
    def _home(self) -> EngineAt:
        """Our own scheduler process."""
        return EngineAt(self._facts.engine, self._facts.address)

    def _link(self) -> SocketLink:
        badge = badge_of(self._handshake.token) if self._handshake is not None else b""
        return open_link(self._settings, self._facts.engine, self._tally, role=GuestRole.WORKER, badge=badge)

    def _tell(self, report: Report) -> None:
        """On the thread of a writer or a stager: pass on what it has counted, before anybody hears of it."""
        self._outbox.put((), report)

    def _after_turn(self, reader: Reader) -> None:
        """On the transfer thread: pass on what ended."""
        results = reader.take_results()
        for result in results:
            if isinstance(result, Result) and result.failure:
                logger.warning("xpyd: KV of %s was not loaded: %s", result.request, result.failure)
        self._outbox.put(results, self._tally.take())


def _report(results: KVConnectorTransferResults, ended: Result) -> None:
    results.finished_recving.add(str(ended.request))
    if ended.failure:
        results.failed_recving.add(str(ended.request))


def _loading(order: Order) -> Command[Reader]:
    return lambda reader, now: reader.load(order, now=now)


def _offering(piece: Piece | Gone, ready: Ready | None) -> Command[Writer]:
    return lambda writer, now: writer.offer(piece, now=now, ready=ready)
