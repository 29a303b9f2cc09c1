"""The half in vLLM's scheduler process: which requests lend and borrow, and when blocks may be freed.

Everything here runs on the engine thread; sockets and time are the control thread's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from xpyd_connector.core.borrower import Borrower
from xpyd_connector.core.control import Control
from xpyd_connector.core.greeting import Guest, Host
from xpyd_connector.core.ids import EngineId, RequestId
from xpyd_connector.core.leases import LeaseBook, LeaseEvent, Released
from xpyd_connector.core.lender import Lender
from xpyd_connector.core.messages import MAX_ID, PROTOCOL, Welcome
from xpyd_connector.core.offers import Offer, digest_prompt, read_offer
from xpyd_connector.core.peers import PeerBook
from xpyd_connector.core.plan import missing_blocks
from xpyd_connector.core.reader import Order
from xpyd_connector.core.tally import Report, Tally, merge
from xpyd_connector.errors import BadOffer
from xpyd_connector.io.link import SocketLink
from xpyd_connector.io.runner import Runner
from xpyd_connector.shell.facts import Facts
from xpyd_connector.shell.metadata import LingeringMetadata, RankHandshake, StepMetadata
from xpyd_connector.shell.outbox import Outbox
from xpyd_connector.shell.stats import XpydStats

if TYPE_CHECKING:
    from xpyd_connector.settings import Settings

logger = init_logger("vllm.xpyd")


@dataclass(slots=True)
class _Borrowing:
    """A request here whose prompt another engine has computed."""

    offer: Offer
    loading: bool = False  # its blocks are allocated and a worker is at it; never loaded twice
    into: Sequence[int] = ()  # the blocks it is loaded into


@dataclass(slots=True)
class _Lingering:
    """Blocks of a load that failed, which NIXL may still write into: kept out of the pool until every rank lets go."""

    blocks: list[KVCacheBlock]
    ranks: int = 0


class SchedulerSide:
    """vLLM's scheduler hooks, in the order vLLM calls them for a request."""

    def __init__(self, facts: Facts, settings: "Settings", wake_engine: Callable[[], None]) -> None:
        self._facts = facts
        self._settings = settings
        self._pool: BlockPool | None = None  # vLLM hands it over after building us
        self._runner: Runner[Control] | None = None  # starts when the workers have told us their memory
        self._outbox: Outbox[Released] = Outbox(on_news=wake_engine)
        self._tally = Tally()  # the engine thread's own
        self._held: dict[RequestId, list[KVCacheBlock]] = {}
        self._borrowings: dict[RequestId, _Borrowing] = {}
        self._lingering: dict[RequestId, _Lingering] = {}
        self._orders: list[Order] = []
        self._gauges: dict[str, float] = {}

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
        link = SocketLink(
            Guest(facts.engine, settings.secret), timeout=settings.handshake_timeout, threads=settings.handshake_threads
        )
        if facts.lends:
            link.listen(facts.address, Host(welcome, settings.secret))
            logger.info("xpyd: engine %s lends KV at %s", facts.engine, facts.address)
        tally = Tally()
        peers = PeerBook(link, fingerprint, tally, retry_after=settings.retry_after)
        leases = LeaseBook(duration=settings.kv_lease_duration, extension=settings.lease_extension)
        borrower = Borrower(link, peers, tally, heartbeat_interval=settings.heartbeat_interval)
        control = Control(Lender(link, leases, tally), borrower, peers, tally)
        self._runner = Runner("xpyd-control", control, link, self._after_turn)
        self._runner.start()

    def stop(self) -> None:
        """End the control thread and close the listener."""
        if self._runner is not None:
            self._runner.stop()

    # ---- the life of a request on the decode engine

    def on_new_request(self, request: Request) -> None:
        """Start renewing the lease of a request the moment it arrives, queued or not."""
        self.free_released()
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        offer = self._usable_offer(request, params)
        if offer is not None:
            own = RequestId(request.request_id)
            self._borrowings[own] = _Borrowing(offer)
            self._post(lambda control, now: control.borrower.want(own, offer, now=now))

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return how many prompt tokens beyond the ``computed`` ones will be loaded, and that it takes a while."""
        borrowing = self._borrowings.get(RequestId(request.request_id))
        if borrowing is None or borrowing.loading:
            return 0, False
        missing = request.num_prompt_tokens - 1 - computed  # the last prompt token is always computed here
        return (missing, True) if missing > 0 else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Order the load of ``external`` tokens into the blocks the request has now."""
        own = RequestId(request.request_id)
        borrowing = self._borrowings.get(own)
        if borrowing is None or borrowing.loading:
            return
        if external == 0:
            self._tally.count("loads_skipped_local")
            self._give_back(own)
            return
        borrowing.loading = True  # from here on it ends in after_step
        offer, (local,) = borrowing.offer, blocks.get_block_ids()
        read, into = missing_blocks(
            request.num_prompt_tokens, external, self._facts.block_size, offer.remote_block_ids[0], local
        )
        borrowing.into = into
        self._orders.append(Order(own, offer.remote_request_id, offer.remote_engine_id, offer.address, read, into))

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Hand the orders of this step to the workers."""
        self.free_released()
        orders, self._orders = self._orders, []
        return StepMetadata(orders, idle=output.total_num_scheduled_tokens == 0)

    def after_step(self, output: KVConnectorOutput) -> None:
        """Stop renewing what the workers have read, or failed to read."""
        self.free_released()
        if isinstance(output.kv_connector_worker_meta, LingeringMetadata):
            self._keep_lingering(output.kv_connector_worker_meta)
        for request in output.finished_recving or ():
            own = RequestId(request)
            if (borrowing := self._borrowings.pop(own, None)) is not None:
                self._settle(own, borrowing.offer.remote_engine_id)

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

    def finished(self, request: Request, blocks: Sequence[int]) -> dict[str, Any] | None:
        """Give back what was borrowed and not loaded; lend what was prefilled for others."""
        self.free_released()
        own = RequestId(request.request_id)
        borrowing = self._borrowings.get(own)
        if borrowing is not None and not borrowing.loading:  # a load under way ends in after_step
            self._give_back(own)
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or not self._facts.lends:
            return None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return None
        return self._lend(request, blocks)

    def free_released(self) -> None:
        """Free the blocks of leases that ended. Called before every allocation, so that nothing is starved."""
        for released in self._outbox.take():
            blocks = self._held.pop(released.request)
            self._block_pool.free_blocks(reversed(blocks))
            expected = released.why in (LeaseEvent.DONE, LeaseEvent.DROPPED)
            level = logger.debug if expected else logger.warning
            level("xpyd: lease of %s ended: %s (%d blocks)", released.request, released.why.name, len(blocks))

    def has_released(self) -> bool:
        """Whether a step is needed to free blocks."""
        return bool(self._outbox)

    def stats(self) -> XpydStats | None:
        """Return the numbers since the last call; gauges only when they changed."""
        gauges = {
            "leases_held": float(len(self._held)),
            "blocks_held": float(sum(map(len, self._held.values()))),
            "requests_borrowing": float(len(self._borrowings)),
            "blocks_lingering": float(sum(len(lingering.blocks) for lingering in self._lingering.values())),
        }
        changed = Report(gauges=gauges if gauges != self._gauges else {})
        self._gauges = gauges
        report = merge([self._outbox.take_report(), self._tally.take(), changed])
        return XpydStats.of(report) if report else None

    def _usable_offer(self, request: Request, params: Mapping[str, Any]) -> Offer | None:
        """Read and check an offer. One that cannot be used costs a local prefill, never a wrong text or the engine."""
        try:
            offer = read_offer(params)
            if request.abort_immediately:
                return offer  # vLLM rejected the real request; this one, with a made-up prompt, gives the blocks back
            self._check_offer(offer, request)
        except BadOffer as exc:
            self._tally.count("offers_bad")
            logger.warning("xpyd: %s computes its own prompt: %s", request.request_id, exc)
            return None
        if offer.xpyd_prompt is not None and offer.xpyd_prompt != _digest(request):
            # Nobody is told: the blocks may well be another request's, which still wants them.
            self._tally.count("offers_other_prompt")
            logger.warning(
                "xpyd: %s computes its own prompt: the offered KV (%s) belongs to another prompt",
                request.request_id,
                offer.remote_request_id,
            )
            return None
        return offer

    def _check_offer(self, offer: Offer, request: Request) -> None:
        needed = request.num_prompt_tokens - 1
        if len(request.request_id) > MAX_ID:
            raise BadOffer(f"the request's own id has {len(request.request_id)} characters, {MAX_ID} are allowed")
        if not self._facts.borrows:
            raise BadOffer("this engine's kv_role is kv_producer, it cannot take KV over")
        if len(offer.remote_block_ids) != 1:
            raise BadOffer(f"{len(offer.remote_block_ids)} KV cache groups are offered, this engine has 1")
        if offer.remote_num_tokens < needed or len(offer.remote_block_ids[0]) * self._facts.block_size < needed:
            raise BadOffer(
                f"{offer.remote_num_tokens} tokens in {len(offer.remote_block_ids[0])} blocks are offered, "
                f"{needed} tokens are needed"
            )

    def _lend(self, request: Request, blocks: Sequence[int]) -> dict[str, Any] | None:
        """Keep a finished request's prompt blocks and return what D must know.

        The blocks are pinned in the pool instead of delaying their release (which would keep the engine stepping
        for as long as anything is held).
        """
        if len(self._held) >= self._settings.max_leases:
            self._tally.count("leases_refused")
            logger.warning("xpyd: %s is not handed over: %d leases are held", request.request_id, len(self._held))
            return None
        own = RequestId(request.request_id)
        prompt = list(blocks[: -(-request.num_prompt_tokens // self._facts.block_size)])
        self._held[own] = [self._block_pool.blocks[block] for block in prompt]
        self._block_pool.touch(self._held[own])
        self._post(lambda control, now: control.lender.grant(own, now=now))
        return self._offer(request, own, prompt).to_params()

    def _offer(self, request: Request, own: RequestId, blocks: list[Any]) -> Offer:
        return Offer(
            remote_engine_id=self._facts.engine,
            remote_request_id=own,
            remote_host=self._facts.address.host,
            remote_port=self._facts.address.port,
            remote_block_ids=(tuple(blocks),),
            remote_num_tokens=request.num_computed_tokens,
            tp_size=self._facts.ranks,
            xpyd_prompt=_digest(request),
        )

    def _settle(self, own: RequestId, engine: EngineId) -> None:
        self._post(lambda control, _: control.borrower.settle(own, engine))

    def _give_back(self, own: RequestId) -> None:
        engine = self._borrowings.pop(own).offer.remote_engine_id
        self._post(lambda control, _: control.borrower.give_back(own, engine))

    def _post(self, command: Callable[[Control, float], None]) -> None:
        if self._runner is None:
            raise RuntimeError("vLLM scheduled a request before it passed on the workers' handshake metadata")
        self._runner.post(command)

    def _after_turn(self, control: Control) -> None:
        """On the control thread: pass on what ended."""
        self._outbox.put(control.lender.take_released(), control.tally.take())

    @property
    def _block_pool(self) -> BlockPool:
        if self._pool is None:
            raise RuntimeError("vLLM scheduled a request before it bound its block pool")
        return self._pool


def _digest(request: Request) -> str | None:
    features = [feature.identifier for feature in request.mm_features]
    if request.lora_request is not None:
        features.append(f"lora:{request.lora_request.lora_name}")
    prompt = request.prompt_token_ids
    return digest_prompt(
        prompt[: request.num_prompt_tokens] if prompt is not None else None, features, request.cache_salt
    )
