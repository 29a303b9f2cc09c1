"""The connector in vLLM's scheduler process: vLLM's hooks for the prefill side and the decode side.

Everything here runs on the engine thread. The control thread owns sockets and deadlines.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLookup
from pdrelay_connector.core.cached_prefix.prefill_scheduler import SearchEnded
from pdrelay_connector.core.control import ControlResult
from pdrelay_connector.core.counters import Counters, StatsReport, merge
from pdrelay_connector.core.lease.lease_table import LeaseEnded
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.messages import Fingerprint
from pdrelay_connector.core.results import (
    BlocksReleased,
    FellAsleep,
    HandshakeEnded,
    LeaseLost,
    LoadResult,
    NumbersDue,
    PeerLost,
)
from pdrelay_connector.core.sleep import Sleep, SleepEvent, SleepState, in_generation
from pdrelay_connector.errors import ConnectorError
from pdrelay_connector.io.secrets import secrets_in_force
from pdrelay_connector.shell.bad_blocks import BadBlocks
from pdrelay_connector.shell.block_shortage import BlockShortage
from pdrelay_connector.shell.cache_resets import before_resets
from pdrelay_connector.shell.cached_prefixes import CachedPrefixes
from pdrelay_connector.shell.control_thread import ControlThread, Handshakes
from pdrelay_connector.shell.decode_modes import BlockTables
from pdrelay_connector.shell.decode_requests import DecodeRequests
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.failed_loads import FailedLoads
from pdrelay_connector.shell.metadata import StepMetadata, WorkerMetadata
from pdrelay_connector.shell.offloaded_blocks import OffloadedBlocks
from pdrelay_connector.shell.other_connectors import OtherConnectors
from pdrelay_connector.shell.prefill_requests import PrefillRequests
from pdrelay_connector.shell.returned_prefixes import ReturnedPrefixes
from pdrelay_connector.shell.timeline_notes import (
    WALL_CLOCK,
    Clock,
    TimelineNotes,
    are_wanted,
    dated,
)
from pdrelay_connector.shell.vllm_stats import PDRelayStats

if TYPE_CHECKING:
    from pdrelay_connector.settings import Settings
    from pdrelay_connector.shell.engine_waker import EngineWaker

logger = init_logger("vllm.pdrelay")

MAX_IDLE_WAIT = 0.2  # s that a step without tokens waits for a push or a request
RESET_WAIT = 0.5  # s that a reset waits for the control thread at once
MAX_RESET_WAITS = 10  # then it fails, as vLLM's own message says


class PDRelayConnectorScheduler:
    """vLLM's scheduler hooks, in the order in which vLLM calls them for a request."""

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: "Settings",
        waker: "EngineWaker",
        clock: Clock = WALL_CLOCK,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        secrets = secrets_in_force(settings)
        signatures = Signatures(secrets, settings.sign_host)
        self._engine_config = engine_config
        self._waker = waker
        self._clock = monotonic
        self._wall_clock = clock
        self._pool: BlockPool | None = None  # vLLM binds it after it has built the connector
        self._counters = Counters(are_wanted())  # of the engine thread
        self._gauges: dict[str, float] = {}  # as last reported
        self._sleep = Sleep()
        self._patience = 2 * settings.transfer_timeout  # s that falling asleep may take
        # as the control thread has said; taken by fall_asleep()
        self._fell_asleep: FellAsleep | None = None
        self._start_again: Callable[[], None] | None = None  # absent before start()
        self._live: dict[str, Request] = {}
        self._notes = TimelineNotes(self._counters, monotonic, clock)
        self._control = ControlThread(
            engine_config,
            settings,
            secrets,
            on_news=waker.wake,
            has_loop=waker.is_open,
            clock=monotonic,
        )
        self._prefills = PrefillRequests(
            engine_config,
            settings,
            self._control.post,
            pool=self._block_pool,
            counters=self._counters,
            signatures=signatures,
            wall_clock=clock,
        )
        self._decodes = DecodeRequests(
            engine_config,
            settings.mode,
            self._control.post,
            pool=self._block_pool,
            counters=self._counters,
            signatures=signatures,
            wall_clock=clock,
            live=self._live.values,
            offloaded=OffloadedBlocks(),
            on_skipped=self._notes.load_skipped,
        )
        self._shortage = BlockShortage(engine_config.groups)
        self._failed_loads = FailedLoads()
        self._bad_blocks = BadBlocks(engine_config.groups, self._block_pool)
        self._other_connectors = OtherConnectors(engine_config.groups, self._block_pool)
        self._returned = ReturnedPrefixes(
            engine_config, self._decodes, self._control.post, self._counters
        )
        self._cached = CachedPrefixes(
            engine_config,
            self._prefills,
            self._control.post,
            pool=self._block_pool,
            counters=self._counters,
        )

    # ---- once, at start

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Keep vLLM's block pool, and give up all leases before its prefix cache is reset."""
        self._pool = pool
        self._decodes.bind_block_pool(pool)
        before_resets(pool, self._give_up_leases)

    def _give_up_leases(self) -> None:
        """End all leases.

        Only when the control thread says so are their blocks free: until then it confirms reads.
        """
        self._prefills.release_preempted(self._live)
        if leases := self._prefills.leases:
            logger.info("pdrelay: the prefix cache is reset: %d leases are revoked", leases)
            self._control.post(lambda control, _: control.lease_manager.revoke_all())
        for _ in range(MAX_RESET_WAITS):
            self.handle_results()
            if not self._prefills.leases:
                return
            self._control.wait_for_results(RESET_WAIT)

    def start(self, handshakes: Handshakes, fingerprint: Fingerprint) -> None:
        """Start the control thread: the workers have registered their memory.

        Peers compare the ``fingerprint``.

        Again after each sleep, for the next generation; vLLM also calls it with a wake-up of an
        engine that is awake.
        """
        sleeps = self._sleep.state is SleepState.ASLEEP
        if self._start_again is not None and not sleeps:
            return
        generation = max(handshake.generation for handshake in handshakes.values())
        engine = in_generation(self._engine_config.engine, generation)
        # if it raises, this engine sleeps on, and vLLM's next call tries again
        self._control.start(handshakes, fingerprint, engine)
        self._start_again = lambda: self.start(handshakes, fingerprint)
        if sleeps:
            self._sleep.on(SleepEvent.WOKEN)
            self._sleep.generation = generation
            self._prefills.engine = engine
            self._decodes.met.lose_all()
            logger.info("pdrelay: engine %s is awake", engine)

    def shutdown(self) -> None:
        """End the control thread and close the listener."""
        self._control.stop()

    def fall_asleep(self) -> None:
        """Release the cache's memory, which vLLM discards next; raises ``ConnectorError``.

        VLLM has paused the engine and reset its prefix cache, so that all leases are given up.
        """
        if self._sleep.state is not SleepState.AWAKE:
            return
        self._sleep.on(SleepEvent.SLEEP_ORDERED)
        leases = self._prefills.leases
        self._control.post(lambda control, now: control.fall_asleep(until=now + self._patience))
        while self._fell_asleep is None:
            self._control.check()
            self._control.wait_for_results(RESET_WAIT)
            self.handle_results()
        failure = self._fell_asleep.failure
        self._fell_asleep = None
        self._sleep.on(SleepEvent.OVERDUE if failure else SleepEvent.DRAINED)
        if failure:
            raise ConnectorError(f"this engine cannot sleep now: {failure}; try again later")
        self._control.keep_commands()
        logger.info(
            "pdrelay: engine %s goes to sleep: %d leases are given up, and no peer is connected", self._prefills.engine,
            leases,
        )  # fmt: skip

    def stay_awake(self) -> None:
        """Go on after :meth:`fall_asleep`: vLLM has not put the memory away."""
        if self._start_again is not None:
            self._start_again()

    # ---- the life of a request

    def on_new_request(self, request: Request) -> None:
        """Begin to renew a request's lease at its arrival: it may queue for longer than a lease."""
        self.handle_results()
        self._live[request.request_id] = request
        self._notes.began(request)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._decodes.begin(request, params)
        elif params.get("do_remote_decode"):
            self._prefills.begin(request, params)
            self._returned.begin(request, params)
        elif params:
            self._prefills.abandon(request, params)
        else:
            self._decodes.begin_alone(request)

    def get_num_new_matched_tokens(
        self, request: Request, computed: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``computed`` will be loaded, and whether asynchronously.

        None: not known yet; vLLM asks again in its next step.
        """
        self._notes.considered(request, computed)
        self._shortage.considered(request, computed)
        if self._returned.searches(request, computed) or self._failed_loads.gives_way(request):
            return None, False
        match = self._decodes.matched_tokens(request, computed)
        self._notes.meeting(request, lasts=self._decodes.is_meeting(request))
        if match[0] is not None:
            self._other_connectors.answered(request, computed)
        return match

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, external: int
    ) -> None:
        """Order the load of ``external`` tokens into the request's blocks."""
        self._failed_loads.over(request.request_id)
        self._other_connectors.allocated(request)
        self._shortage.allocated(request)
        self._decodes.allocated(request, blocks, external)
        self._notes.load_ordered(request, external)

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        """Return this step's metadata for the workers."""
        if (loaded := self._failed_loads.lacking_blocks()) is not None:
            self._shortage.considered(loaded, loaded.num_computed_tokens)
        # before a look-up finds what this step computes
        number = self._cached.scheduled(output)
        is_awaited = self._bad_blocks.scheduled(output, number) or self._cached.is_on
        self._give_up_spoilt()
        self.handle_results()
        self._relieve()  # before a look-up leases more
        self._cached.look_up()
        if output.total_num_scheduled_tokens == 0 and self._may_wait():
            self._waker.wait(MAX_IDLE_WAIT)
            self.handle_results()
            self._cached.look_up()
        self._other_connectors.step_over()
        self._notes.step(output)
        self._prefills.step(output, self._live)
        metadata = self._decodes.metadata(output)
        metadata.number = number if is_awaited else 0
        metadata.pieces = self._prefills.take_computed(output)
        metadata.sampled = self._prefills.take_sampled()
        return metadata

    def _relieve(self) -> None:
        """Revoke leases if a request lacks blocks."""
        short = self._shortage.step(self._block_pool())
        now = self._clock()
        self._cached.relieve(short, now=now)
        self._prefills.relieve(short, now=now)

    def _give_up_spoilt(self) -> None:
        """Hand no KV over of requests that were found to have bad blocks."""
        for own in self._bad_blocks.take_spoilt():
            if own in self._live:
                self._prefills.give_up(self._live[own])
            else:
                self._bad_blocks.forget(own)
                self._prefills.take_back(own)

    def _may_wait(self) -> bool:
        """Whether a step without tokens may wait for the control thread or a new request.

        With asynchronous scheduling a running request may have output in flight, which must not
        wait.
        """
        return (
            self._engine_config.steps_independently
            and self._decodes.may_wait(is_searching=self._returned.is_searching)
            and not self._has_pending_results()
            and not any(request.status == RequestStatus.RUNNING for request in self._live.values())
            and not self._other_connectors.have_work(self._live.values(), self._decodes.loading)
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Handle the loads that the workers have reported to vLLM."""
        self.handle_results()
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, WorkerMetadata):
            meta = WorkerMetadata()
        self._cached.leave_out(self._bad_blocks.ended(meta.step, output.invalid_block_ids))
        self._give_up_spoilt()
        self._prefills.step_ended()
        self._decodes.update_quarantine(meta)
        self._cached.ended(meta.step)
        self._prefills.add_sums(meta.sums)
        self._decodes.step_begun(meta.deferred)
        self._notes.loads_reported(output.finished_recving or (), output.failed_recving)
        self._decodes.loads_ended(output.finished_recving or (), output.failed_recving)
        self._failed_loads.ended(output.finished_recving or (), output.failed_recving, self._live)

    def request_finished(self, request: Request, blocks: BlockTables) -> dict[str, Any] | None:
        """Return the kv_transfer_params of a prefill for a decode engine; None: no prefill."""
        self.handle_results()
        self._live.pop(request.request_id, None)
        self._notes.finished(request)
        self._returned.finished(request)
        self._decodes.finished(request)
        self._failed_loads.over(request.request_id)
        is_spoilt = self._bad_blocks.finished(request.request_id, blocks)
        return self._prefills.finished(
            request, blocks, is_spoilt=is_spoilt, is_sure=not self._bad_blocks.may_come
        )

    def handle_results(self) -> None:
        """Handle the control thread's results.

        Every hook starts with it, so blocks are free before an allocation.
        """
        self._control.note_turn()
        for result in self._control.take_results():
            self._handle(result)

    def _handle(self, result: ControlResult) -> None:
        match result:
            case LeaseEnded(request, reason):
                self._notes.lease_ended(request, reason)
                self._prefills.lease_ended(request, reason)
            case LoadResult(request, failure, checks=checks):
                self._notes.load_ended(
                    request, has_failed=bool(failure), is_compared=checks is not None
                )
                self._decodes.push_ended(result, is_live=result.request in self._live)
            case BlocksReleased(request):
                self._decodes.update_quarantine(WorkerMetadata(released=[request]))
            case HandshakeEnded() | PeerLost():
                self._decodes.peer_changed(result)
            case LeaseLost(request):
                self._decodes.lease_lost(request)
            case SearchEnded():
                self._returned.ended(result)
            case PrefixLookup():
                self._cached.add(result)
            case FellAsleep():
                self._fell_asleep = result
            case NumbersDue():
                pass  # get_kv_connector_stats() collects them in this step

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step: for results, workers' metadata, or quarantined blocks."""
        self._control.note_turn()  # the first call of an engine that wakes up
        return self._has_pending_results() or self._decodes.awaits_quarantine

    def _has_pending_results(self) -> bool:
        return self._control.has_results or self._prefills.has_pending or self._decodes.has_pending

    def get_kv_connector_stats(self) -> PDRelayStats | None:
        """Return the numbers since the last call; gauges only if they have changed."""
        gauges = {**self._prefills.gauges, **self._decodes.gauges}
        changed = StatsReport(
            gauges=gauges if gauges != self._gauges else {},
            incompatible=self._decodes.met.take_incompatible(),
            compatible=self._decodes.met.take_compatible(),
        )
        self._gauges = gauges
        report = merge([self._control.take_report(), self._counters.take_report(), changed])
        report = dated(report, self._clock, self._wall_clock)
        return PDRelayStats(report) if report else None

    def _block_pool(self) -> BlockPool:
        if self._pool is None:
            raise RuntimeError("vLLM scheduled a request before it bound its block pool")
        return self._pool
