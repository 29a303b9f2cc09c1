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

from xpyd_connector.core.control import Control
from xpyd_connector.core.counters import Report, Tally, merge
from xpyd_connector.core.ids import BlockId, PartId, RequestId
from xpyd_connector.core.lease.decode_scheduler import Borrower
from xpyd_connector.core.lease.kv_params import REFUSALS, Booking, Offer, read_transfer
from xpyd_connector.core.lease.lease_table import LeaseBook, LeaseEvent, Released
from xpyd_connector.core.lease.prefill_scheduler import Lender
from xpyd_connector.core.lease.signatures import Signatures
from xpyd_connector.core.messages import PROTOCOL, Welcome
from xpyd_connector.core.push.decode_scheduler import Landings
from xpyd_connector.core.push.prefill_scheduler import Pushes
from xpyd_connector.core.results import LeaseLost, LetGo, Result
from xpyd_connector.core.session.handshake import GuestRole, Host, badge_of, hash_of
from xpyd_connector.core.session.peers import PeerBook
from xpyd_connector.core.session.worker_links import Crew
from xpyd_connector.core.staging.decode_scheduler import Unpacking
from xpyd_connector.core.staging.prefill_scheduler import Stagings
from xpyd_connector.core.staging.slots import Slots
from xpyd_connector.errors import BadOffer
from xpyd_connector.io.link import SocketLink
from xpyd_connector.io.runner import Runner
from xpyd_connector.io.secrets import secrets_in_force
from xpyd_connector.settings import Granularity, Mode
from xpyd_connector.shell.block_shortage import Lack
from xpyd_connector.shell.decode_modes import Clock, Decode, PullDecode, PushDecode, Tables, digest
from xpyd_connector.shell.engine_config import Facts
from xpyd_connector.shell.held_blocks import Holding
from xpyd_connector.shell.metadata import LingeringMetadata, RankHandshake, StepMetadata
from xpyd_connector.shell.network import open_link, reach_remarks
from xpyd_connector.shell.outbox import Outbox
from xpyd_connector.shell.push_progress import Streams
from xpyd_connector.shell.sliding_windows import NULL, Windows
from xpyd_connector.shell.vllm_stats import XpydStats

if TYPE_CHECKING:
    from xpyd_connector.settings import Settings
    from xpyd_connector.shell.engine_waker import Door

logger = init_logger("vllm.xpyd")

WALL_CLOCK: Clock = time.time  # noqa: TID251 -- two engines share no other; what it may be wrong by is allowed for
LONGEST_NAP = 0.2  # s that a step with nothing to compute waits for a push, or for a request


@dataclass(slots=True)
class _Borrowing:
    """A request here whose prompt another engine has computed."""

    source: Offer | Booking
    loading: bool = False  # its blocks are allocated and a worker is at it; never loaded twice
    into: Sequence[int] = ()  # the blocks it is loaded into


@dataclass(slots=True)
class _Lingering:
    """Blocks of a load that failed, which NIXL may still write into: kept out of the pool until every rank lets go."""

    blocks: list[KVCacheBlock]
    ranks: int = 0


class SchedulerSide:
    """vLLM's scheduler hooks, in the order vLLM calls them for a request."""

    def __init__(
        self,
        facts: Facts,
        settings: "Settings",
        door: "Door",
        clock: Clock = WALL_CLOCK,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall_clock = clock
        self._secrets = secrets_in_force(settings)
        self._signatures = Signatures(self._secrets)
        self._facts = facts
        self._settings = settings
        self._door = door
        self._clock = monotonic
        self._last_turn = monotonic()  # of vLLM's engine loop; the control thread looks at it, too
        self._says_so = False  # that nothing is renewed
        self._pool: BlockPool | None = None  # vLLM hands it over after building us
        self._runner: Runner[Control] | None = None  # starts when the workers have told us their memory
        self._outbox: Outbox[Released | Result | LetGo | LeaseLost] = Outbox(on_news=door.knock)
        self._tally = Tally()  # the engine thread's own
        self._held = Holding()  # by the name that decode engines know
        self._lack: Lack | None = None  # only where leases may be revoked
        if facts.lends and settings.revoke_after:
            self._lack = Lack(facts.groups, patience=settings.revoke_after)
        self._borrowings: dict[RequestId, _Borrowing] = {}
        self._lingering: dict[RequestId, _Lingering] = {}
        self._live: dict[str, Request] = {}
        self._gauges: dict[str, float] = {}
        self._windows = Windows(facts.groups, lambda: self._block_pool)
        self._decode: Decode = PullDecode(facts, self._post, self._signatures, clock)
        self._landed: PushDecode | None = None  # the same, in push
        self._streams: Streams | None = None  # only where KV is pushed
        if settings.mode is Mode.PUSH:
            self._decode = self._landed = PushDecode(facts, self._post)
        if settings.mode is Mode.PUSH and facts.lends:
            is_chunked = settings.push_granularity is Granularity.CHUNK
            self._streams = Streams(facts.groups, is_chunked=is_chunked)

    # ---- once, at start

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Remember where blocks are kept and freed."""
        self._pool = pool

    def start(self, handshakes: Mapping[int, RankHandshake]) -> None:
        """Start the control thread, and listen if this engine lends."""
        settings, facts = self._settings, self._facts
        fingerprint = next(iter(handshakes.values())).fingerprint
        ranks = tuple(handshakes[rank].rank for rank in sorted(handshakes))
        welcome = Welcome(PROTOCOL, facts.engine, fingerprint, ranks)
        tally, secrets = Tally(), self._secrets
        workers = tuple(hash_of(badge_of(handshake.token)) for handshake in handshakes.values())
        link = open_link(settings, facts.engine, tally, role=GuestRole.SCHEDULER, workers=workers, secrets=secrets)
        unpacks = facts.borrows and facts.staging_blocks and settings.mode is Mode.PUSH  # its own workers call, too
        if facts.lends or unpacks:
            link.listen(facts.address, Host(welcome, secrets, facts.address.host))
            logger.info("xpyd: engine %s listens at %s", facts.engine, facts.address)
        for remark in reach_remarks(settings) if facts.borrows else ():
            logger.info("xpyd: %s", remark)
        self._runner = Runner("xpyd-control", self._control(link, tally, welcome, handshakes), link, self._after_turn)
        self._runner.start()

    def _control(
        self, link: SocketLink, tally: Tally, welcome: Welcome, handshakes: Mapping[int, RankHandshake]
    ) -> Control:
        settings = self._settings
        peers = PeerBook(link, welcome.fingerprint, tally, retry_after=settings.retry_after)
        leases = LeaseBook(
            duration=settings.kv_lease_duration,
            extension=settings.lease_extension,
            reading=settings.transfer_timeout,
            same_engine=link.are_of_one_engine,
        )
        lender = Lender(link, leases, tally)
        borrower = Borrower(
            link,
            peers,
            tally,
            heartbeat_interval=settings.heartbeat_interval,
            loop_timeout=settings.engine_loop_timeout or inf,
            last_turn=lambda: self._last_turn,
        )
        tokens = {rank: handshake.token for rank, handshake in handshakes.items()}
        room = [self._facts.staging_blocks] * len(self._facts.groups) if self._facts.staging_blocks else None
        if settings.mode is Mode.PULL:
            stagings = None
            if room is not None and self._facts.lends:
                crew, slots, patience = Crew(link, tokens), Slots[PartId](room), 2 * settings.transfer_timeout
                stagings = Stagings(link, lender, tally, crew, slots, blocks=self._facts.blocks, patience=patience)
            return Control(lender, borrower, peers, tally, stagings=stagings)
        unpacking = None
        if room is not None and self._facts.borrows:
            unpacking = Unpacking(link, tally, Crew(link, tokens), Slots[RequestId](room))
        timeout = settings.registration_timeout
        pushes = Pushes(link, lender, tally, tokens=tokens, patience=timeout)
        landings = Landings(
            link,
            peers,
            borrower,
            tally,
            tuple(handshakes[rank].landing for rank in sorted(handshakes)),
            timeout=timeout,
            patience=settings.patience,
            squeeze=settings.transfer_timeout,
            unpacking=unpacking,
        )
        return Control(lender, borrower, peers, tally, pushes=pushes, landings=landings, unpacking=unpacking)

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
        elif params.get("do_remote_decode") and self._streams is not None:
            self._begin_stream(request, params)

    def _borrow(self, request: Request, params: Mapping[str, Any]) -> None:
        """Read what the router carried here. What cannot be used costs a local prefill, never a wrong text."""
        own = RequestId(request.request_id)
        try:
            source = self._decode.read(request, params)
        except BadOffer as exc:
            self._tally.count(REFUSALS[type(exc)])
            logger.warning("xpyd: %s computes its own prompt: %s", own, exc)
            return
        self._borrowings[own] = _Borrowing(source)
        self._post(lambda control, now: control.borrower.want(own, source, now=now))

    def _begin_stream(self, request: Request, params: Mapping[str, Any]) -> None:
        streams = self._pushing
        try:
            name = read_transfer(params, request.request_id)
        except BadOffer as exc:
            self._tally.count("transfers_bad")
            logger.warning("xpyd: %s is not handed over: %s", request.request_id, exc)
            return
        if name in streams or name in self._held:
            self._tally.count("transfers_duplicate")
            logger.warning("xpyd: %s is not handed over: there is a transfer %s already", request.request_id, name)
            return
        streams.begin(request, name, digest(request))

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return how many prompt tokens beyond the ``computed`` ones will be loaded, and that it takes a while."""
        if self._lack is not None:
            self._lack.asked(request, computed)
        borrowing = self._borrowings.get(RequestId(request.request_id))
        if borrowing is None or borrowing.loading:
            return 0, False
        missing = request.num_prompt_tokens - 1 - computed  # the last prompt token is always computed here
        return (missing, True) if missing > 0 else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Order the load of ``external`` tokens into the blocks the request has now."""
        if self._lack is not None:
            self._lack.allocated(request)
        own = RequestId(request.request_id)
        borrowing = self._borrowings.get(own)
        if borrowing is None or borrowing.loading:
            return
        if external == 0:
            self._tally.count("loads_skipped_local")
            self._give_back(own)
            return
        borrowing.loading = True  # from here on it ends in after_step
        borrowing.into = self._decode.start(request, borrowing.source, external, blocks.get_block_ids())
        if self._landed is None:  # in push, P knows by our registration
            engine = borrowing.source.remote_engine_id
            self._post(lambda control, _: control.borrower.reading(own, engine))

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Hand this step's work to the workers."""
        self.free_released()
        if output.total_num_scheduled_tokens == 0 and self._may_nap():
            self._door.wait(LONGEST_NAP)
            self.free_released()
        self._revoke()
        self._windows.step(output, self._live)
        metadata = self._decode.metadata(output)
        if self._streams is not None:
            metadata.pieces = self._streams.take_news(output)
        return metadata

    def _revoke(self) -> None:
        """Have leases that nobody reads end, if a request has waited too long for the blocks they hold."""
        if self._lack is None or not (lacking := self._lack.step(self._block_pool, now=self._clock())):
            return
        if candidates := self._held.candidates(lacking.blocks, lacking.request.priority):
            logger.warning(
                "xpyd: %s has lacked %d blocks for %g s: leases that nobody reads are revoked",
                lacking.request.request_id,
                lacking.blocks,
                self._settings.revoke_after,
            )
            self._post(lambda control, now: control.revoke(candidates, lacking.blocks, now=now))

    def _may_nap(self) -> bool:
        """Whether nothing can happen here before the control thread, or a request, knocks.

        In push that is so while KV is written here. In pull the workers must be asked for what they have read, and a
        nap is right only between looks at blocks that linger. A request that runs may have its step's output under way
        (asynchronous scheduling): it must not wait for us.
        """
        is_loading = any(borrowing.loading for borrowing in self._borrowings.values())
        return (
            self._facts.steps_alone
            and (self._looks_for_lingering() and not is_loading if self._landed is None else is_loading)
            and not self._has_something_to_tell()
            and not any(request.status == RequestStatus.RUNNING for request in self._live.values())
        )

    def after_step(self, output: KVConnectorOutput) -> None:
        """Take in which loads the workers reported to vLLM."""
        self.free_released()
        if isinstance(output.kv_connector_worker_meta, LingeringMetadata):
            self._keep_lingering(output.kv_connector_worker_meta)
        for request in output.finished_recving or ():
            own = RequestId(request)
            if (borrowing := self._borrowings.pop(own, None)) is not None:
                self._decode.ended(own, borrowing.source)

    def _keep_lingering(self, news: LingeringMetadata) -> None:
        """Pin blocks that NIXL may still write into, before vLLM frees them for others; unpin those it let go."""
        for own in news.lingers:
            if own not in self._lingering:
                blocks = [self._block_pool.blocks[block] for block in self._borrowings[own].into]
                self._block_pool.touch(blocks)
                self._lingering[own] = _Lingering(blocks)
            self._lingering[own].ranks += 1
        for own in news.let_go:
            lingering = self._lingering[own]
            lingering.ranks -= 1
            if not lingering.ranks:
                self._block_pool.free_blocks(reversed(self._lingering.pop(own).blocks))

    # ---- the end of a request, on either engine

    def finished(self, request: Request, blocks: Tables) -> dict[str, Any] | None:
        """Give back what was borrowed and not loaded; lend what was prefilled for others."""
        self.free_released()
        self._live.pop(request.request_id, None)
        own = RequestId(request.request_id)
        borrowing = self._borrowings.get(own)
        if borrowing is not None and borrowing.loading:
            self._decode.abort(own)  # its load ends in after_step
        elif borrowing is not None:
            self._give_back(own)
        try:
            return self._hand_over(request, self._windows.restore(request.request_id, blocks))
        finally:
            self._windows.release(request.request_id)

    def _hand_over(self, request: Request, blocks: Tables) -> dict[str, Any] | None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or not self._facts.lends:
            return None
        name = RequestId(request.request_id) if self._streams is None else self._streams.name_of(request)
        if name is None:
            return None  # said why when it came
        has_kv = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        offer = self._lend(request, name, blocks) if has_kv else None
        if offer is None and self._streams is not None:
            self._streams.abandon(request)
            self._post(lambda control, now: control.pushes.abandoned(name, now=now))
        return offer

    def free_released(self) -> None:
        """Free the blocks of leases that ended. Called before every allocation, so that nothing is starved."""
        self._last_turn = self._clock()  # vLLM's loop turns: each of its hooks leads here
        for news in self._outbox.take():
            match news:
                case Released(request, why):
                    self._free(request, why)
                case Result():
                    self._arrive(news)
                case LetGo(request):
                    self._keep_lingering(LingeringMetadata(let_go=[request]))
                case LeaseLost(request):
                    self._compute_here(request)

    def _compute_here(self, own: RequestId) -> None:
        """P does not hold the KV of a request any more: it computes its own prompt, unless its load has begun.

        What has begun is decided by the fence; in push, P's answer to our registration says that it is over.
        """
        borrowing = self._borrowings.get(own)
        if borrowing is None or borrowing.loading:
            return
        del self._borrowings[own]
        self._tally.count("loads_revoked")
        logger.warning("xpyd: %s computes its own prompt: %s has ended its lease", own, borrowing.source.address)

    def _free(self, request: RequestId, why: LeaseEvent) -> None:
        blocks = self._held.take(request)
        self._block_pool.free_blocks(reversed(blocks))
        if self._streams is not None:
            self._streams.forget(request)
        level = logger.debug if why in (LeaseEvent.DONE, LeaseEvent.DROPPED) else logger.warning
        level("xpyd: lease of %s ended: %s (%d blocks)", request, why.name, len(blocks))

    def _arrive(self, result: Result) -> None:
        """Push: a load has ended; the workers report it to vLLM in the next step."""
        if self._landed is None:
            raise TypeError("the control thread reports a load, and this engine pulls")
        if result.failure:
            level = logger.warning if result.request in self._live else logger.debug  # nobody waits for an aborted one
            level("xpyd: KV of %s was not written here: %s", result.request, result.failure)
        if result.lingers:
            self._keep_lingering(LingeringMetadata(lingers=[result.request]))
        self._landed.arrived.append(result)

    def has_news(self) -> bool:
        """Whether a step is needed: to free blocks, to tell the workers something, or to ask about lingering ones."""
        self._last_turn = self._clock()  # an engine that is woken asks this first
        return self._has_something_to_tell() or self._looks_for_lingering()

    def _looks_for_lingering(self) -> bool:
        """In pull only the workers know when NIXL lets go, and they can tell it only with a step."""
        return self._landed is None and bool(self._lingering)

    def _has_something_to_tell(self) -> bool:
        return (
            bool(self._outbox)
            or (self._streams is not None and self._streams.has_news())
            or (self._landed is not None and bool(self._landed.arrived))
        )

    def stats(self) -> XpydStats | None:
        """Return the numbers since the last call; gauges only when they changed."""
        gauges = {
            "leases_held": float(len(self._held)),
            "blocks_held": float(self._held.blocks),
            "requests_borrowing": float(len(self._borrowings)),
            "blocks_lingering": float(sum(len(lingering.blocks) for lingering in self._lingering.values())),
        }
        changed = Report(gauges=gauges if gauges != self._gauges else {})
        self._gauges = gauges
        report = merge([self._outbox.take_report(), self._tally.take(), changed])
        return XpydStats.of(report) if report else None

    def _lend(self, request: Request, name: RequestId, blocks: Tables) -> dict[str, Any] | None:
        """Keep a finished request's prompt blocks and return what D must know.

        The blocks are pinned in the pool instead of delaying their release (which would keep the engine stepping
        for as long as anything is held).
        """
        prompt = [
            list(ids[group.blocks_of(0, request.num_prompt_tokens)])
            for group, ids in zip(self._facts.groups, blocks, strict=True)
        ]
        held = [self._block_pool.blocks[block] for ids in prompt for block in ids if block != NULL]
        if reason := self._too_much(held):
            self._tally.count("leases_refused")
            logger.warning("xpyd: %s is not handed over: %s", request.request_id, reason)
            return None
        self._held.add(name, held, request.priority)
        self._block_pool.touch(held)
        self._post(lambda control, now: control.grant(name, now=now))
        if self._streams is not None:
            self._streams.finish(request, prompt)
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

    def _offer(self, request: Request, name: RequestId, blocks: Tables) -> Offer:
        return Offer(
            remote_engine_id=self._facts.engine,
            remote_request_id=RequestId(request.request_id),
            remote_host=self._facts.address.host,
            remote_port=self._facts.address.port,
            remote_block_ids=tuple(tuple(BlockId(block) for block in ids) for ids in blocks),
            remote_num_tokens=request.num_computed_tokens,
            tp_size=self._facts.ranks,
            transfer_mode=self._settings.mode.value,
            xpyd_prompt=digest(request),
            transfer_id=name if self._streams is not None else None,
            xpyd_block_sizes=tuple(group.block_size for group in self._facts.groups),
            xpyd_expires_at=ceil(self._wall_clock() + self._settings.kv_lease_duration),
        )

    def _give_back(self, own: RequestId) -> None:
        engine = self._borrowings.pop(own).source.remote_engine_id
        self._post(lambda control, _: control.borrower.give_back(own, engine))

    def _post(self, command: Callable[[Control, float], None]) -> None:
        if self._runner is None:
            raise RuntimeError("vLLM scheduled a request before it passed on the workers' handshake metadata")
        self._runner.post(command)

    def _after_turn(self, control: Control) -> None:
        """On the control thread: pass on what ended."""
        if control.borrower.is_withholding != self._says_so:
            self._says_so = control.borrower.is_withholding
            if self._says_so:
                logger.warning(
                    "xpyd: the engine's loop has not turned for %g s: the leases of requests that wait are not renewed",
                    self._settings.engine_loop_timeout,
                )
            else:
                logger.info("xpyd: the engine's loop turns again: leases are renewed")
        self._outbox.put(control.take_news(now=time.monotonic()), control.tally.take())

    @property
    def _pushing(self) -> Streams:
        if self._streams is None:
            raise RuntimeError("this engine does not push")
        return self._streams

    @property
    def _block_pool(self) -> BlockPool:
        if self._pool is None:
            raise RuntimeError("vLLM scheduled a request before it bound its block pool")
        return self._pool
