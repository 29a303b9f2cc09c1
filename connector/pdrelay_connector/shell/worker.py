"""The connector in each vLLM worker: registers the KV cache, and passes loads on to a thread.

Everything here runs on the worker's main thread and only touches queues. The transfer thread owns
NIXL's transfers.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from pdrelay_connector.core.counters import Counters, StatsReport
from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.layout.transfer_plan import runs_per_block
from pdrelay_connector.core.messages import Fingerprint, MemoryKind
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.pull.overdue_loads import OverdueLoads
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.push.push_job import ComputedBlocks, TransferOver
from pdrelay_connector.core.results import BlocksReleased, LoadResult
from pdrelay_connector.core.returning_writer import ReturningWriter
from pdrelay_connector.core.sleep import Sleep, SleepEvent, SleepState, in_generation
from pdrelay_connector.core.verify.comparison import compare, count, sums_of
from pdrelay_connector.core.verify.sampling import SampledBlock
from pdrelay_connector.errors import ConnectorError
from pdrelay_connector.io.nixl import (
    HOST_MEMORY,
    UNPINNED,
    make_agent,
)
from pdrelay_connector.io.runner import Command, Runner
from pdrelay_connector.shell.cache_regions import KernelLayout, own_caches
from pdrelay_connector.shell.devices import Ready, binding, computed
from pdrelay_connector.shell.engine_config import EngineConfig, WorkerRank
from pdrelay_connector.shell.host_staging import CopyRows
from pdrelay_connector.shell.metadata import RankHandshake, StepMetadata, WorkerMetadata
from pdrelay_connector.shell.network import bind_data_plane
from pdrelay_connector.shell.outbox import Outbox
from pdrelay_connector.shell.registered_memory import RegisteredMemory
from pdrelay_connector.shell.timeline_notes import WALL_CLOCK, are_wanted, dated
from pdrelay_connector.shell.transfer_threads import TransferThreads, TransferThreadStarter
from pdrelay_connector.shell.vllm_stats import PDRelayStats

if TYPE_CHECKING:
    from pdrelay_connector.settings import Settings

logger = init_logger("vllm.pdrelay")

TOKEN_BYTES = 32
LOOK_EVERY = 0.01  # s between two looks whether anything is under way


class PDRelayConnectorWorker:
    """vLLM's worker hooks."""

    def __init__(self, engine_config: EngineConfig, settings: "Settings", rank: WorkerRank) -> None:
        self._engine_config = engine_config
        self._settings = settings
        self._rank = rank
        self._handshake: RankHandshake | None = None  # absent before register_kv_caches()
        self._memory: RegisteredMemory | None = None  # likewise
        self._threads = TransferThreads()
        self._push_results: list[LoadResult] = []
        self._outbox: Outbox[LoadResult | BlocksReleased] = Outbox()
        self._news = WorkerMetadata()  # for the scheduler
        self._counters = Counters(are_wanted())
        self._loading = OverdueLoads()
        self._is_stuck = False  # the transfer thread, in a call
        self._idle = False
        self._sleep = Sleep()
        self._register_again: Callable[[], None] = lambda: None  # once registered

    def register_kv_caches(
        self,
        caches: Mapping[str, torch.Tensor],
        fingerprint: Fingerprint,
        kernel_layout: KernelLayout,
    ) -> None:
        """Register the KV cache or a staging buffer with NIXL, and start this role's threads.

        A rank that keeps what another one serves has no part in it.
        """
        if self._rank.is_copy:
            return
        caches = own_caches(caches, self._engine_config.layers)
        bind_data_plane(self._settings, self._engine_config.address)
        self._register_again = lambda: self._register(caches, fingerprint, kernel_layout)
        self._register_again()

    def unregister_kv_caches(self) -> None:
        """Release the memory; raises ``ConnectorError`` while something may write into it."""
        if self._memory is None:
            return
        self._sleep.on(SleepEvent.SLEEP_ORDERED)
        try:
            self._give_up()
        except ConnectorError:
            self._sleep.on(SleepEvent.OVERDUE)
            raise
        self.shutdown()
        self._memory.unregister()
        self._threads = TransferThreads()
        self._memory = self._handshake = None
        self._sleep.on(SleepEvent.DRAINED)
        logger.info(
            "pdrelay: rank %d of stage %d has let go of its memory",
            self._rank.tensor,
            self._rank.stage,
        )

    def restore_kv_caches(self) -> None:
        """Register the memory for the next generation of this engine, and start the threads."""
        if self._sleep.state is SleepState.ASLEEP:
            self._sleep.on(SleepEvent.WOKEN)
            self._sleep.generation += 1
            self._register_again()

    def _give_up(self) -> None:
        """End loads and pushes, and wait until NIXL reports that none is in flight."""
        give_up_at = time.monotonic() + self._settings.transfer_timeout
        runner: Runner[Any] | None = self._threads.reader or self._threads.writer
        if runner is None:
            return
        runner.post(lambda mover, now: mover.give_up("this engine goes to sleep", now=now))
        while runner.ask(
            lambda mover: bool(mover.uses_memory), timeout=self._settings.transfer_timeout
        ):
            if time.monotonic() >= give_up_at:
                raise ConnectorError(
                    "this rank cannot let go of its memory: an engine that hangs may still read it "
                    "or write into it; try again later (vllm:pdrelay_blocks_quarantined)"
                )
            time.sleep(LOOK_EVERY)

    def _register(
        self,
        caches: Mapping[str, torch.Tensor],
        fingerprint: Fingerprint,
        kernel_layout: KernelLayout,
    ) -> None:
        memory = self._memory = RegisteredMemory(
            self._make_agent, self._engine_config, self._rank, caches, kernel_layout
        )
        producer = memory.producer
        consumer = memory.consumer
        self._handshake = RankHandshake(
            producer.info,
            consumer.info,
            fingerprint,
            os.urandom(TOKEN_BYTES),
            self._sleep.generation,
        )
        logger.info(
            "pdrelay: rank %d of stage %d registered %d layers of %d blocks, %.3f GB of %s%s; %d "
            "descriptors a block",
            self._rank.tensor, self._rank.stage, len(caches), producer.info.regions[0].blocks,
            memory.gigabytes, memory.kind, " (staging)" if self._engine_config.staging_blocks else "",
            runs_per_block(producer.info),
        )  # fmt: skip
        self._threads = TransferThreadStarter(
            self._engine_config,
            self._settings,
            memory,
            self._handshake,
            engine=in_generation(self._engine_config.engine, self._sleep.generation),
            counters=self._counters,
            forward=self._forward,
            after_turn=self._after_turn,
        ).start()

    def _make_agent(self, kind: MemoryKind, device: torch.device) -> Any:
        unpinned = UNPINNED if self._engine_config.sleeps else {}
        return make_agent(
            str(uuid.uuid4()),
            progress_delay_us=self._settings.progress_delay_us,
            backends={
                backend.name: {**unpinned, **backend.parameters}
                for backend in self._settings.backends
            },
            bind=None if kind == HOST_MEMORY else binding(device),
        )

    def set_host_xfer_buffer_ops(self, copy_rows: CopyRows) -> None:
        """Copy between device and host with vLLM's operation for this platform."""
        if self._memory is not None:
            self._memory.use(copy_rows)

    def get_handshake_metadata(self) -> RankHandshake | None:
        """Return the description of this rank for peers; None before :meth:`register_kv_caches`."""
        return self._handshake

    def start_load_kv(self, step: StepMetadata) -> None:
        """Pass this step's orders to the transfer thread."""
        self._idle = step.idle
        self._news.step = step.number
        self._news.deferred = step.deferred
        for order in step.orders:
            if self._threads.reader is None:
                raise RuntimeError(
                    f"request {order.request} is to be loaded on an engine that is no consumer in "
                    f"pull"
                )
            self._loading.add(order)
            self._threads.reader.post(_loading(order))
        self._push_results += [self._compared(result) for result in step.arrived]

    def take_sums(self, sampled: Mapping[RequestId, Sequence[SampledBlock]]) -> None:
        """Take checksums of finished prefills, for the scheduler.

        The next step may write into their blocks.
        """
        if self._rank.is_copy:
            return
        for name, blocks in sampled.items():
            memory = self._registered
            self._news.sums[name] = [sums_of(memory.producer.info.worker, blocks, memory.cache)]

    def _compared(self, result: LoadResult) -> LoadResult:
        """Compare pushed blocks with the checksums of the rank that wrote them."""
        if (checks := result.checks) is None:
            return result
        memory = self._registered
        own = memory.consumer.info.worker
        sums = next(
            (rank_sums for rank_sums in checks.sums if rank_sums.worker == own), checks.sums[0]
        )
        comparison = compare(sums, checks.token_ranges, memory.cache)
        if comparison.wrong:  # the scheduler counts the load: it may be wrong on several ranks
            logger.warning("pdrelay: the push of %s failed: %s", result.request, comparison.failure)
        counters = Counters()
        count(comparison, counters)
        self._forward(counters.take_report())
        return result._replace(failure=comparison.failure)

    @property
    def _registered(self) -> RegisteredMemory:
        if self._memory is None:
            raise RuntimeError("the cache must be registered first")
        return self._memory

    def add_computed(self, pieces: list[ComputedBlocks | TransferOver]) -> None:
        """Push the blocks of earlier steps, once the device has computed them."""
        if not pieces or self._rank.is_copy:
            return
        if self._threads.writer is None:
            raise ConnectorError("KV is to be pushed by an engine that is no producer in push")
        ready = computed(self._memory.device) if self._memory is not None else None
        for piece in pieces:
            self._threads.writer.post(_offering(piece, ready))

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Return the ended loads.

        A step without tokens waits ``idle_wait`` for a load that is under way: without the wait
        vLLM steps in a busy loop, on a core that the transfer needs.
        """
        self._threads.check()
        if (
            self._loading
            and self._idle
            and self._engine_config.steps_independently
            and not self._outbox
        ):
            self._outbox.wait(self._settings.idle_wait)
        results = KVConnectorTransferResults()
        for news in self._outbox.take_items():
            match ended := self._loading.take(news):
                case BlocksReleased(request):
                    self._news.released.append(request)
                case LoadResult():
                    self._end_load(results, ended)
                case None:
                    pass
        self._give_up_if_stuck(results)
        for result in self._push_results:
            _report(results, result)  # in push the scheduler itself pins quarantined blocks
        self._push_results = []
        return results

    def _end_load(self, results: KVConnectorTransferResults, ended: LoadResult) -> None:
        _report(results, ended)
        if ended.quarantined:
            self._news.quarantined.append(ended.request)

    def _give_up_if_stuck(self, results: KVConnectorTransferResults) -> None:
        """Fail all loads while a call of NIXL does not return: nothing else would end them."""
        timeout = self._settings.transfer_timeout
        was_stuck = self._is_stuck
        self._is_stuck = self._threads.reader is not None and self._threads.reader.busy_s > timeout
        if not self._is_stuck:
            return
        counters = Counters()
        if not was_stuck:
            counters.count("transfer_thread_stuck")
            logger.error(
                "pdrelay: a call of NIXL has not returned for %g s: loads of this rank fail until it "
                "does, and if it never does, this engine must be started again",
                timeout,
            )
        for engine, given_up in self._loading.give_up(f"NIXL has not returned for {timeout:g} s"):
            counters.count_load("loads_failed_timeout", engine)
            self._end_load(results, given_up)
        self._forward(counters.take_report())

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Return the news for the scheduler since the last call; None: there is none."""
        news = self._news
        self._news = WorkerMetadata()
        return news if news != WorkerMetadata() else None

    def get_kv_connector_stats(self) -> PDRelayStats | None:
        """Return the numbers since the last call."""
        report = dated(self._outbox.take_report(), time.monotonic, WALL_CLOCK)
        return PDRelayStats(report) if report else None

    def shutdown(self) -> None:
        """End the threads."""
        self._threads.stop()

    def _forward(self, report: StatsReport) -> None:
        """Pass a writer's or stager's counts on; called on its thread, before its next message."""
        self._outbox.put((), report)

    def _after_turn(self, reader: PullReader | ReturningWriter) -> None:
        """On the transfer thread: pass the ended loads on."""
        results = reader.take_results()
        for result in results:
            if isinstance(result, LoadResult) and result.failure:
                logger.warning("pdrelay: the load of %s failed: %s", result.request, result.failure)
        self._outbox.put(results, self._counters.take_report())


def _report(results: KVConnectorTransferResults, ended: LoadResult) -> None:
    results.finished_recving.add(str(ended.request))
    if ended.failure:
        results.failed_recving.add(str(ended.request))


def _loading(order: LoadOrder) -> Command[PullReader | ReturningWriter]:
    return lambda reader, now: reader.load(order, now=now)


def _offering(
    piece: ComputedBlocks | TransferOver, ready: Ready | None
) -> Command[PushWriter | ReturningWriter]:
    return lambda push_writer, now: push_writer.add_computed(piece, now=now, ready=ready)
