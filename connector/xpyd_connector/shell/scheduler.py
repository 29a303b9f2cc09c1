"""The half in vLLM's scheduler process: which requests lend and borrow, and when blocks may be freed.

Everything here runs on the engine thread; sockets and time are the control thread's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from xpyd_connector.core.control import ControlPlane
from xpyd_connector.core.counters import Counters, StatsReport, merge
from xpyd_connector.core.ids import BlockId, PartId, RequestId
from xpyd_connector.core.lease.decode_scheduler import LeaseRenewer
from xpyd_connector.core.lease.kv_params import REFUSALS, PullParams, PushParams, parse_transfer_id
from xpyd_connector.core.lease.lease_table import LeaseEnded, LeaseEvent, LeaseTable
from xpyd_connector.core.lease.prefill_scheduler import LeaseManager
from xpyd_connector.core.lease.signatures import Signatures
from xpyd_connector.core.messages import PROTOCOL, Welcome
from xpyd_connector.core.push.decode_scheduler import PushReceiver
from xpyd_connector.core.push.prefill_scheduler import PushCoordinator
from xpyd_connector.core.results import BlocksReleased, LeaseLost, LoadResult
from xpyd_connector.core.session.handshake import HandshakeServer, ProcessRole, badge_of, hash_of
from xpyd_connector.core.session.peers import PeerTable
from xpyd_connector.core.session.worker_links import WorkerLinks
from xpyd_connector.core.staging.decode_scheduler import StagingReceiver
from xpyd_connector.core.staging.prefill_scheduler import StagingCoordinator
from xpyd_connector.core.staging.slots import Slots
from xpyd_connector.errors import InvalidKvParams
from xpyd_connector.io.link import SocketLink
from xpyd_connector.io.runner import Runner
from xpyd_connector.io.secrets import secrets_in_force
from xpyd_connector.settings import Granularity, Mode
from xpyd_connector.shell.block_shortage import BlockShortage
from xpyd_connector.shell.decode_modes import BlockTables, Clock, DecodeMode, PullDecode, PushDecode, digest
from xpyd_connector.shell.engine_config import EngineConfig
from xpyd_connector.shell.held_blocks import HeldBlocks
from xpyd_connector.shell.metadata import QuarantineMetadata, RankHandshake, StepMetadata
from xpyd_connector.shell.network import open_link, reach_remarks
from xpyd_connector.shell.outbox import Outbox
from xpyd_connector.shell.push_progress import PushProgress
from xpyd_connector.shell.sliding_windows import NULL, SlidingWindowPins
from xpyd_connector.shell.vllm_stats import XpydStats

if TYPE_CHECKING:
    from xpyd_connector.settings import Settings
    from xpyd_connector.shell.engine_waker import EngineWaker

logger = init_logger("vllm.xpyd")

WALL_CLOCK: Clock = time.time  # noqa: TID251 -- two engines share no other; what it may be wrong by is allowed for
MAX_IDLE_WAIT = 0.2  # s that a step with nothing to compute waits for a push, or for a request


@dataclass(slots=True)
class _RemotePrefill:
    """A request here whose prompt another engine has computed."""

    source: PullParams | PushParams
    loading: bool = False  # its blocks are allocated and a worker is at it; never loaded twice
    into: Sequence[int] = ()  # the blocks it is loaded into


@dataclass(slots=True)
class _Quarantined:
    """Blocks of a load that failed, which NIXL may still write into: kept out of the pool until every rank lets go."""

    blocks: list[KVCacheBlock]
    ranks: int = 0


class XpydConnectorScheduler:
    """vLLM's scheduler hooks, in the order vLLM calls them for a request."""

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: "Settings",
        waker: "EngineWaker",
        clock: Clock = WALL_CLOCK,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall_clock = clock
        self._secrets = secrets_in_force(settings)
        self._signatures = Signatures(self._secrets)
        self._engine_config = engine_config
        self._settings = settings
        self._waker = waker
        self._clock = monotonic
        self._last_turn = monotonic()  # of vLLM's engine loop; the control thread looks at it, too
        self._has_warned = False  # that nothing is renewed
        self._pool: BlockPool | None = None  # vLLM hands it over after building us
        self._runner: Runner[ControlPlane] | None = None  # starts when the workers have told us their memory
        self._outbox: Outbox[LeaseEnded | LoadResult | BlocksReleased | LeaseLost] = Outbox(on_news=waker.wake)
        self._counters = Counters()  # the engine thread's own
        self._held = HeldBlocks()  # by the name that decode engines know
        self._shortage: BlockShortage | None = None  # only where leases may be revoked
        if engine_config.is_producer and settings.revoke_after:
            self._shortage = BlockShortage(engine_config.groups, threshold=settings.revoke_after)
        self._remote_prefills: dict[RequestId, _RemotePrefill] = {}
        self._quarantined: dict[RequestId, _Quarantined] = {}
        self._live: dict[str, Request] = {}
        self._gauges: dict[str, float] = {}
        self._window_pins = SlidingWindowPins(engine_config.groups, lambda: self._block_pool)
        self._decode: DecodeMode = PullDecode(engine_config, self._post, self._signatures, clock)
        self._push_decode: PushDecode | None = None  # the same, in push
        self._push_progress: PushProgress | None = None  # only where KV is pushed
        if settings.mode is Mode.PUSH:
            self._decode = self._push_decode = PushDecode(engine_config, self._post)
        if settings.mode is Mode.PUSH and engine_config.is_producer:
            is_chunked = settings.push_granularity is Granularity.CHUNK
            self._push_progress = PushProgress(engine_config.groups, is_chunked=is_chunked)

    # ---- once, at start

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Remember where blocks are kept and freed."""
        self._pool = pool

    def start(self, handshakes: Mapping[int, RankHandshake]) -> None:
        """Start the control thread, and listen if this engine lends."""
        settings, engine_config = self._settings, self._engine_config
        fingerprint = next(iter(handshakes.values())).fingerprint
        ranks = tuple(handshakes[rank].rank for rank in sorted(handshakes))
        welcome = Welcome(PROTOCOL, engine_config.engine, fingerprint, ranks)
        counters, secrets = Counters(), self._secrets
        workers = tuple(hash_of(badge_of(handshake.token)) for handshake in handshakes.values())
        link = open_link(
            settings, engine_config.engine, counters, role=ProcessRole.SCHEDULER, workers=workers, secrets=secrets
        )
        receives_pushes = (
            engine_config.is_consumer and engine_config.staging_blocks and settings.mode is Mode.PUSH
        )  # its own workers call, too
        if engine_config.is_producer or receives_pushes:
            link.listen(engine_config.address, HandshakeServer(welcome, secrets, engine_config.address.host))
            logger.info("xpyd: engine %s listens at %s", engine_config.engine, engine_config.address)
        for remark in reach_remarks(settings) if engine_config.is_consumer else ():
            logger.info("xpyd: %s", remark)
        self._runner = Runner(
            "xpyd-control", self._control(link, counters, welcome, handshakes), link, self._after_turn
        )
        self._runner.start()

    def _control(
        self, link: SocketLink, counters: Counters, welcome: Welcome, handshakes: Mapping[int, RankHandshake]
    ) -> ControlPlane:
        settings = self._settings
        peers = PeerTable(link, welcome.fingerprint, counters, retry_after=settings.retry_after)
        leases = LeaseTable(
            duration=settings.kv_lease_duration,
            extension=settings.lease_extension,
            reading=settings.transfer_timeout,
            same_engine=link.are_of_one_engine,
        )
        lease_manager = LeaseManager(link, leases, counters)
        lease_renewer = LeaseRenewer(
            link,
            peers,
            counters,
            heartbeat_interval=settings.heartbeat_interval,
            loop_timeout=settings.engine_loop_timeout or inf,
            last_turn=lambda: self._last_turn,
        )
        tokens = {rank: handshake.token for rank, handshake in handshakes.items()}
        room = (
            [self._engine_config.staging_blocks] * len(self._engine_config.groups)
            if self._engine_config.staging_blocks
            else None
        )
        if settings.mode is Mode.PULL:
            staging_coordinator = None
            if room is not None and self._engine_config.is_producer:
                workers, slots, read_timeout = (
                    WorkerLinks(link, tokens),
                    Slots[PartId](room),
                    2 * settings.transfer_timeout,
                )
                staging_coordinator = StagingCoordinator(
                    link,
                    lease_manager,
                    counters,
                    workers,
                    slots,
                    blocks=self._engine_config.blocks,
                    read_timeout=read_timeout,
                )
            return ControlPlane(lease_manager, lease_renewer, peers, counters, staging_coordinator=staging_coordinator)
        staging_receiver = None
        if room is not None and self._engine_config.is_consumer:
            staging_receiver = StagingReceiver(link, counters, WorkerLinks(link, tokens), Slots[RequestId](room))
        timeout = settings.registration_timeout
        pushes = PushCoordinator(link, lease_manager, counters, tokens=tokens, registration_timeout=timeout)
        push_receiver = PushReceiver(
            link,
            peers,
            lease_renewer,
            counters,
            tuple(handshakes[rank].landing for rank in sorted(handshakes)),
            timeout=timeout,
            peer_timeout=settings.peer_timeout,
            contention_timeout=settings.transfer_timeout,
            staging_receiver=staging_receiver,
        )
        return ControlPlane(
            lease_manager,
            lease_renewer,
            peers,
            counters,
            push_coordinator=pushes,
            push_receiver=push_receiver,
            staging_receiver=staging_receiver,
        )

    def stop(self) -> None:
        """End the control thread and close the listener."""
        if self._runner is not None:
            self._runner.stop()

    # ---- the life of a request

    def on_new_request(self, request: Request) -> None:
        """Start renewing the lease of a request the moment it arrives, queued or not."""
        self.free_released()
        self._live[request.request_id] = request
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._borrow(request, params)
        elif params.get("do_remote_decode") and self._push_progress is not None:
            self._begin_push(request, params)

    def _borrow(self, request: Request, params: Mapping[str, Any]) -> None:
        """Read what the router carried here. What cannot be used costs a local prefill, never a wrong text."""
        own = RequestId(request.request_id)
        try:
            source = self._decode.read(request, params)
        except InvalidKvParams as exc:
            self._counters.count(REFUSALS[type(exc)])
            logger.warning("xpyd: %s computes its own prompt: %s", own, exc)
            return
        self._remote_prefills[own] = _RemotePrefill(source)
        self._post(lambda control, now: control.lease_renewer.start_renewing(own, source, now=now))

    def _begin_push(self, request: Request, params: Mapping[str, Any]) -> None:
        streams = self._pushing
        try:
            name = parse_transfer_id(params, request.request_id)
        except InvalidKvParams as exc:
            self._counters.count("transfer_ids_invalid")
            logger.warning("xpyd: %s is not handed over: %s", request.request_id, exc)
            return
        if name in streams or name in self._held:
            self._counters.count("transfer_ids_duplicate")
            logger.warning("xpyd: %s is not handed over: there is a transfer %s already", request.request_id, name)
            return
        streams.begin(request, name, digest(request))

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return how many prompt tokens beyond the ``computed`` ones will be loaded, and that it takes a while."""
        if self._shortage is not None:
            self._shortage.asked(request, computed)
        remote_prefill = self._remote_prefills.get(RequestId(request.request_id))
        if remote_prefill is None or remote_prefill.loading:
            return 0, False
        missing = request.num_prompt_tokens - 1 - computed  # the last prompt token is always computed here
        return (missing, True) if missing > 0 else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Order the load of ``external`` tokens into the blocks the request has now."""
        if self._shortage is not None:
            self._shortage.allocated(request)
        own = RequestId(request.request_id)
        remote_prefill = self._remote_prefills.get(own)
        if remote_prefill is None or remote_prefill.loading:
            return
        if external == 0:
            self._counters.count("loads_skipped_local")
            self._release_lease(own)
            return
        remote_prefill.loading = True  # from here on it ends in after_step
        remote_prefill.into = self._decode.start(request, remote_prefill.source, external, blocks.get_block_ids())
        if self._push_decode is None:  # in push, P knows by our registration
            engine = remote_prefill.source.remote_engine_id
            self._post(lambda control, _: control.lease_renewer.read_started(own, engine))

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Hand this step's work to the workers."""
        self.free_released()
        if output.total_num_scheduled_tokens == 0 and self._may_wait():
            self._waker.wait(MAX_IDLE_WAIT)
            self.free_released()
        self._revoke()
        self._window_pins.step(output, self._live)
        metadata = self._decode.metadata(output)
        if self._push_progress is not None:
            metadata.pieces = self._push_progress.take_computed(output)
        return metadata

    def _revoke(self) -> None:
        """Revoke unread leases if a request has waited too long for the blocks they hold."""
        if self._shortage is None or not (lacking := self._shortage.step(self._block_pool, now=self._clock())):
            return
        if candidates := self._held.candidates(lacking.blocks, lacking.request.priority):
            logger.warning(
                "xpyd: %s has lacked %d blocks for %g s: unread leases are revoked",
                lacking.request.request_id,
                lacking.blocks,
                self._settings.revoke_after,
            )
            self._post(lambda control, now: control.revoke(candidates, lacking.blocks, now=now))

    def _may_wait(self) -> bool:
        """Whether nothing can happen here before the control thread, or a request, wakes the engine.

        In push that is so while KV is written here. In pull the workers must be asked for what they have read, and a
        wait is right only between polls of quarantined blocks. A request that runs may have its step's output under way
        (asynchronous scheduling): it must not wait for us.
        """
        is_loading = any(remote_prefill.loading for remote_prefill in self._remote_prefills.values())
        return (
            self._engine_config.steps_independently
            and (self._awaits_quarantine() and not is_loading if self._push_decode is None else is_loading)
            and not self._has_pending_results()
            and not any(request.status == RequestStatus.RUNNING for request in self._live.values())
        )

    def after_step(self, output: KVConnectorOutput) -> None:
        """Take in which loads the workers reported to vLLM."""
        self.free_released()
        if isinstance(output.kv_connector_worker_meta, QuarantineMetadata):
            self._update_quarantine(output.kv_connector_worker_meta)
        for request in output.finished_recving or ():
            own = RequestId(request)
            if (remote_prefill := self._remote_prefills.pop(own, None)) is not None:
                self._decode.ended(own, remote_prefill.source)

    def _update_quarantine(self, news: QuarantineMetadata) -> None:
        """Pin blocks that NIXL may still write into, before vLLM frees them for others; unpin those it let go."""
        for own in news.quarantined:
            if own not in self._quarantined:
                blocks = [self._block_pool.blocks[block] for block in self._remote_prefills[own].into]
                self._block_pool.touch(blocks)
                self._quarantined[own] = _Quarantined(blocks)
            self._quarantined[own].ranks += 1
        for own in news.released:
            lingering = self._quarantined[own]
            lingering.ranks -= 1
            if not lingering.ranks:
                self._block_pool.free_blocks(reversed(self._quarantined.pop(own).blocks))

    # ---- the end of a request, on either engine

    def finished(self, request: Request, blocks: BlockTables) -> dict[str, Any] | None:
        """Give back what was borrowed and not loaded; lend what was prefilled for others."""
        self.free_released()
        self._live.pop(request.request_id, None)
        own = RequestId(request.request_id)
        remote_prefill = self._remote_prefills.get(own)
        if remote_prefill is not None and remote_prefill.loading:
            self._decode.abort(own)  # its load ends in after_step
        elif remote_prefill is not None:
            self._release_lease(own)
        try:
            return self._hand_over(request, self._window_pins.restore(request.request_id, blocks))
        finally:
            self._window_pins.release(request.request_id)

    def _hand_over(self, request: Request, blocks: BlockTables) -> dict[str, Any] | None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or not self._engine_config.is_producer:
            return None
        name = RequestId(request.request_id) if self._push_progress is None else self._push_progress.name_of(request)
        if name is None:
            return None  # said why when it came
        has_kv = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        offer = self._lend(request, name, blocks) if has_kv else None
        if offer is None and self._push_progress is not None:
            self._push_progress.abandon(request)
            self._post(lambda control, now: control.push_coordinator.abandoned(name, now=now))
        return offer

    def free_released(self) -> None:
        """Free the blocks of leases that ended. Called before every allocation, so that nothing is starved."""
        self._last_turn = self._clock()  # vLLM's loop turns: each of its hooks leads here
        for news in self._outbox.take():
            match news:
                case LeaseEnded(request, why):
                    self._free(request, why)
                case LoadResult():
                    self._on_push_result(news)
                case BlocksReleased(request):
                    self._update_quarantine(QuarantineMetadata(released=[request]))
                case LeaseLost(request):
                    self._compute_here(request)

    def _compute_here(self, own: RequestId) -> None:
        """P does not hold the KV of a request any more: it computes its own prompt, unless its load has begun.

        What has begun is decided by the fence; in push, P's answer to our registration says that it is over.
        """
        remote_prefill = self._remote_prefills.get(own)
        if remote_prefill is None or remote_prefill.loading:
            return
        del self._remote_prefills[own]
        self._counters.count("loads_skipped_lease_lost")
        logger.warning("xpyd: %s computes its own prompt: %s has ended its lease", own, remote_prefill.source.address)

    def _free(self, request: RequestId, why: LeaseEvent) -> None:
        blocks = self._held.take(request)
        self._block_pool.free_blocks(reversed(blocks))
        if self._push_progress is not None:
            self._push_progress.forget(request)
        level = logger.debug if why in (LeaseEvent.DONE, LeaseEvent.DROPPED) else logger.warning
        level("xpyd: lease of %s ended: %s (%d blocks)", request, why.name, len(blocks))

    def _on_push_result(self, result: LoadResult) -> None:
        """Push: a load has ended; the workers report it to vLLM in the next step."""
        if self._push_decode is None:
            raise TypeError("the control thread reports a load, and this engine pulls")
        if result.failure:
            level = logger.warning if result.request in self._live else logger.debug  # an aborted one is not waited for
            level("xpyd: KV of %s was not written here: %s", result.request, result.failure)
        if result.quarantined:
            self._update_quarantine(QuarantineMetadata(quarantined=[result.request]))
        self._push_decode.arrived.append(result)

    def has_pending(self) -> bool:
        """Whether a step is needed: to free blocks, to tell the workers something, or to ask about lingering ones."""
        self._last_turn = self._clock()  # an engine that is woken asks this first
        return self._has_pending_results() or self._awaits_quarantine()

    def _awaits_quarantine(self) -> bool:
        """In pull only the workers know when NIXL lets go, and they can tell it only with a step."""
        return self._push_decode is None and bool(self._quarantined)

    def _has_pending_results(self) -> bool:
        return (
            bool(self._outbox)
            or (self._push_progress is not None and self._push_progress.has_pending())
            or (self._push_decode is not None and bool(self._push_decode.arrived))
        )

    def stats(self) -> XpydStats | None:
        """Return the numbers since the last call; gauges only when they changed."""
        gauges = {
            "leases_held": float(len(self._held)),
            "blocks_held": float(self._held.blocks),
            "requests_waiting_for_remote_kv": float(len(self._remote_prefills)),
            "blocks_quarantined": float(sum(len(lingering.blocks) for lingering in self._quarantined.values())),
        }
        changed = StatsReport(gauges=gauges if gauges != self._gauges else {})
        self._gauges = gauges
        report = merge([self._outbox.take_report(), self._counters.take(), changed])
        return XpydStats.of(report) if report else None

    def _lend(self, request: Request, name: RequestId, blocks: BlockTables) -> dict[str, Any] | None:
        """Keep a finished request's prompt blocks and return what D must know.

        The blocks are pinned in the pool instead of delaying their release (which would keep the engine stepping
        for as long as anything is held).
        """
        prompt = [
            list(ids[group.blocks_of(0, request.num_prompt_tokens)])
            for group, ids in zip(self._engine_config.groups, blocks, strict=True)
        ]
        held = [self._block_pool.blocks[block] for ids in prompt for block in ids if block != NULL]
        if reason := self._too_much(held):
            self._counters.count("leases_refused")
            logger.warning("xpyd: %s is not handed over: %s", request.request_id, reason)
            return None
        self._held.add(name, held, request.priority)
        self._block_pool.touch(held)
        self._post(lambda control, now: control.grant(name, now=now))
        if self._push_progress is not None:
            self._push_progress.finish(request, prompt)
        return self._signatures.sign(self._offer(request, name, prompt)).to_params()

    def _too_much(self, blocks: Sequence[KVCacheBlock]) -> str:
        """Say why these blocks cannot be held, too, or nothing."""
        if len(self._held) >= self._settings.max_leases:
            return f"{len(self._held)} leases are held; max_leases is {self._settings.max_leases}"
        there_are = self._block_pool.num_gpu_blocks - 1  # without the null block
        would_be, share = self._held.blocks + self._held.new_blocks(blocks), self._settings.max_held_share
        if len(self._held) and would_be > share * there_are:  # a prompt that is nearly as long as the cache goes alone
            return f"leases would hold {would_be} of {there_are} blocks; max_held_share is {share:g}"
        return ""

    def _offer(self, request: Request, name: RequestId, blocks: BlockTables) -> PullParams:
        return PullParams(
            remote_engine_id=self._engine_config.engine,
            remote_request_id=RequestId(request.request_id),
            remote_host=self._engine_config.address.host,
            remote_port=self._engine_config.address.port,
            remote_block_ids=tuple(tuple(BlockId(block) for block in ids) for ids in blocks),
            remote_num_tokens=request.num_computed_tokens,
            tp_size=self._engine_config.ranks,
            transfer_mode=self._settings.mode.value,
            xpyd_prompt=digest(request),
            transfer_id=name if self._push_progress is not None else None,
            xpyd_block_sizes=tuple(group.block_size for group in self._engine_config.groups),
            xpyd_expires_at=ceil(self._wall_clock() + self._settings.kv_lease_duration),
        )

    def _release_lease(self, own: RequestId) -> None:
        engine = self._remote_prefills.pop(own).source.remote_engine_id
        self._post(lambda control, _: control.lease_renewer.release(own, engine))

    def _post(self, command: Callable[[ControlPlane, float], None]) -> None:
        if self._runner is None:
            raise RuntimeError("vLLM scheduled a request before it passed on the workers' handshake metadata")
        self._runner.post(command)

    def _after_turn(self, control: ControlPlane) -> None:
        """On the control thread: pass on what ended."""
        if control.lease_renewer.is_withholding != self._has_warned:
            self._has_warned = control.lease_renewer.is_withholding
            if self._has_warned:
                logger.warning(
                    "xpyd: the engine's loop has not turned for %g s: the leases of requests that wait are not renewed",
                    self._settings.engine_loop_timeout,
                )
            else:
                logger.info("xpyd: the engine's loop turns again: leases are renewed")
        self._outbox.put(control.take_results(now=time.monotonic()), control.counters.take())

    @property
    def _pushing(self) -> PushProgress:
        if self._push_progress is None:
            raise RuntimeError("this engine does not push")
        return self._push_progress

    @property
    def _block_pool(self) -> BlockPool:
        if self._pool is None:
            raise RuntimeError("vLLM scheduled a request before it bound its block pool")
        return self._pool
