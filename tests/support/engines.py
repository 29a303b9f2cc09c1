"""Prefill and decode engines made of the connector's real cores, an in-memory network and virtual time.

What vLLM's scheduler would do (allocate, free, reuse blocks) is played here, so that a test can ask
the two questions that matter: did a request get the right bytes, and did every block come back?
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdrelay_connector.core.control import ControlPlane
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, EngineId, RequestId
from pdrelay_connector.core.layout.source_ranks import heads_of
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.kv_params import PullParams
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager, RevocableLease
from pdrelay_connector.core.messages import PROTOCOL, Fingerprint, Hello, LentBlocks, RankInfo, Region, Welcome
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.results import BlocksReleased, FellAsleep, LeaseLost, LoadResult
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.verify.comparison import sums_of
from pdrelay_connector.core.verify.sampling import Sampling
from pdrelay_connector.errors import TransferError
from pdrelay_connector.io.recovering_agent import OpenBackend, RecoveringAgent
from support.in_memory import BLOCK_BYTES, InMemoryLink, InMemoryNetwork, InMemoryTransferAgent
from support.memory_reader import MemoryReader

FINGERPRINT = Fingerprint(
    vllm="0.32.0", dtype="bf16", cache_dtype="auto", layers=1, kv_heads=1, head_size=8, groups="full",
    attention="CPU_ATTN", draft_model="none", config="c0", tokenizer="t0", weights="w0",
)  # fmt: skip
BLOCKS = 12  # beside block 0, which nobody uses
BLOCK_SIZE = 4  # tokens
LEASE = 30.0
TIMEOUT = 20.0
LOOP_TIMEOUT = 300.0
NOTHING, EVERYTHING = Sampling(0.0, 1), Sampling(1.0, 256)


def changed(struct, **changes):
    """Return a copy of a frozen message with other values."""
    return type(struct)(**{**{name: getattr(struct, name) for name in struct.__struct_fields__}, **changes})


def rank_info(
    name, blocks=BLOCKS + 1, rank=0, ranks=1, size=BLOCK_SIZE, width=BLOCK_BYTES // BLOCK_SIZE, all_heads=None
):
    """A rank of one layer, with one head if nothing is said; 4 tokens of one are one piece of the in-memory fabric."""
    all_heads = ranks if all_heads is None else all_heads
    heads = max(all_heads // ranks, 1)
    region = Region(0, blocks, heads, size, width, heads * size * width, size * width, width, all_heads=all_heads)
    return RankInfo(rank, ranks, name.encode(), "DRAM", 0, (region,))


def lent(first, blocks):
    """Blocks of the one KV cache group, from the prompt's block ``first`` on, as a registration names them."""
    blocks = tuple(map(BlockId, blocks))
    return (LentBlocks(first * BLOCK_SIZE, (first + len(blocks)) * BLOCK_SIZE, blocks),)


def right(request, number, head):
    """The bytes of one head of one block of a prompt."""
    return f"{request}/{number}{f'@{head}' if head else ''}".encode()


class Blocks:
    """What both kinds of engine do with their blocks: ``into`` and ``held`` have those that are not ``free``."""

    lent = ()  # blocks that another engine may write into

    def revoke(self, request, *, now):
        """Another prompt needs the blocks."""
        self.control.revoke([RevocableLease(RequestId(request), len(self.held[RequestId(request)]))], 1, now=now)

    def finish(self, request):
        """The request whose prompt was loaded has its answer: its blocks are free, and others may overwrite them."""
        self._free(self.into.pop(RequestId(request)))

    def owned(self):
        """Return the blocks that are not free, by what has them."""
        return [*self.held.values(), *self.into.values()]

    def result(self, request) -> LoadResult | None:
        return self.results.get(RequestId(request))

    def _free(self, blocks):
        for block in blocks:
            assert block not in self.free, "a block was freed twice"
            assert block not in self.lent, "a block was freed that P may write into"
            self._fill(block, b"reused")
            self.free.append(block)

    def _fill(self, block, data):
        for memory in self.memories:
            memory[block * self.pieces : (block + 1) * self.pieces] = [data] * self.pieces


@dataclass
class Engine(Blocks):
    """One engine process: ``free``, ``held`` (lent) and ``into`` (being loaded, or loaded) share out its blocks."""

    network: InMemoryNetwork
    name: str
    address: Address
    fingerprint: Fingerprint = FINGERPRINT
    retry_after: float = 1.0
    lease: float = LEASE
    timeout: float = TIMEOUT
    rank: int = 0  # the one whose worker reads here
    ranks: int = 1
    heads: int | None = None  # KV heads of the model; if nothing is said, each rank has one of its own
    alive: bool = True
    frozen: bool = False
    held: dict = field(default_factory=dict)
    freed: list = field(default_factory=list)
    closed: list = field(default_factory=list)  # backends
    slept: list = field(default_factory=list)  # what came of each attempt to sleep
    results: dict = field(default_factory=dict)
    orders: dict = field(default_factory=dict)
    into: dict = field(default_factory=dict)
    on_result: Callable[[LoadResult], None] = lambda result: None
    on_lost: Callable[[RequestId], None] = lambda request: None
    sampling: Sampling = NOTHING
    sampled: dict = field(default_factory=dict)  # of finished prefills, for the workers' next step
    is_busy: bool = False  # its workers run a long step
    turned_at: float | None = None  # when the engine's loop hung up; nobody sets it while it turns

    def __post_init__(self):
        self.heads = self.heads or self.ranks
        self.pieces = max(self.heads // self.ranks, 1)  # of a block on one rank: one for each head
        names = [f"{self.name}/{rank}" if rank else self.name for rank in range(self.ranks)]
        self.memories = [[b"zero"] * (BLOCKS + 1) * self.pieces for _ in names]
        self.network.memories.update(zip(names, self.memories, strict=True))
        self.other_links = [InMemoryLink(self.network, name) for name in names[1:]]  # whose memory dies with them
        self.free = list(range(1, BLOCKS + 1))
        self.link, self.worker_link = InMemoryLink(self.network, self.name), InMemoryLink(self.network, self.name)
        self.counters, self.worker_tally = Counters(), Counters()
        peers = PeerTable(self.link, self.fingerprint, self.counters, retry_after=self.retry_after)
        leases = LeaseTable(
            duration=self.lease,
            extension=self.lease * 2 / 3,
            reading=self.timeout,
            same_engine=self.link.are_of_one_engine,
        )
        self.control = ControlPlane(
            LeaseManager(self.link, leases, self.counters, sums_timeout=self.timeout / 4),
            LeaseRenewer(
                self.link,
                peers,
                self.counters,
                heartbeat_interval=self.lease / 6,
                loop_timeout=LOOP_TIMEOUT,
                last_turn=lambda: float("inf") if self.turned_at is None else self.turned_at,
            ),
            peers,
            self.counters,
            close_all=self.link.close_all,
        )
        self.leases, self.peers = leases, peers
        self.now = 0.0  # as of its latest turn
        self.movers = [InMemoryTransferAgent(self.network, self.name)]  # the backends that it has built
        self.builds_none = False  # NIXL cannot build another backend
        self.recovering = RecoveringAgent(
            self.mover, self._build, self.worker_tally, timeout=self.timeout, clock=lambda: self.now
        )
        worker_peers = PeerTable(self.worker_link, self.fingerprint, self.worker_tally, retry_after=self.retry_after)
        infos = tuple(
            rank_info(name, rank=rank, ranks=self.ranks, all_heads=self.heads) for rank, name in enumerate(names)
        )
        own = infos[self.rank]
        self.caches = [
            MemoryReader(memory, shape=f"{rank} of {self.ranks}", pieces=self.pieces, size=BLOCK_SIZE)
            for rank, memory in enumerate(self.memories)
        ]
        self.reader = PullReader(
            self.worker_link,
            self.recovering,
            worker_peers,
            self.worker_tally,
            own,
            timeout=self.timeout,
            cache=self.caches[self.rank],
        )
        self.worker_peers = worker_peers
        welcome = Welcome(PROTOCOL, EngineId(self.name), self.fingerprint, infos, self.lease)
        self.network.listen(self.address, self.link, welcome)

    @property
    def mover(self):
        """The backend that is in use."""
        return self.movers[-1]

    def _build(self):
        if self.builds_none:
            raise TransferError("no device")
        self.movers.append(mover := InMemoryTransferAgent(self.network, self.name))
        return OpenBackend(mover, lambda: self.closed.append(mover))

    def prefill(self, request, blocks, *, now):
        """Compute a prompt into ``blocks`` blocks, lend them, and return the offer; None when full."""
        if len(self.free) < blocks:
            return None
        ids = [self.free.pop(0) for _ in range(blocks)]
        for number, block in enumerate(ids):
            for rank, memory in enumerate(self.memories):
                heads = range(*heads_of(self.heads, self.ranks, rank))
                memory[block * self.pieces : (block + 1) * self.pieces] = [right(request, number, h) for h in heads]
        self.held[RequestId(request)] = ids
        is_sampled = self.sampling.takes(RequestId(request))
        if is_sampled:
            tokens = blocks * BLOCK_SIZE + 1
            self.sampled[RequestId(request)] = self.sampling.choose(
                RequestId(request), [ids], sizes={0: BLOCK_SIZE}, states=set(), tokens=tokens
            )
        self.control.grant(RequestId(request), now=now, sampled=is_sampled)
        return PullParams(EngineId(self.name), RequestId(request), *self.address, (tuple(ids),), blocks * BLOCK_SIZE)

    def load(self, request, offer, *, now):
        """Allocate blocks and order the load, as the scheduler does for an admitted request."""
        blocks = offer.remote_block_ids[0]
        if len(self.free) < len(blocks):
            return None
        into = self.into[RequestId(request)] = [BlockId(self.free.pop(0)) for _ in blocks]
        for block in into:
            self._fill(block, b"fresh")
        whole = TokenRange(0, 0, len(blocks) * BLOCK_SIZE, blocks, into)
        order = LoadOrder(RequestId(request), offer.remote_request_id, offer.remote_engine_id, offer.address, (whole,))
        self.orders[order.request] = order
        self.now = now
        self.reader.load(order, now=now)
        self.control.lease_renewer.read_started(order.request, order.engine)
        return into

    def turn(self, *, now):
        """One turn of both threads, then what the engine thread does with the outcome."""
        if not self.alive or self.frozen:
            return
        self.now = now
        while self.sampled and not self.is_busy:
            name, sampled = self.sampled.popitem()
            sums = [sums_of(rank, sampled, cache) for rank, cache in enumerate(self.caches)]
            self.control.lease_manager.add_sums(name, sums, now=now)
        for link, core in ((self.link, self.control), (self.worker_link, self.reader)):
            for event in link.poll():
                core.on(event, now=now)
            core.advance(now=now)
        for news in self.control.take_results(now=now):
            self._on_news(news, now)
        for result in self.reader.take_results():
            self._ended(result)

    def _on_news(self, news, now):
        match news:
            case LeaseEnded(request):
                self.freed.append(news)
                self._free(self.held.pop(request))
            case LeaseLost(request):
                self.on_lost(request)
            case FellAsleep():
                self.slept.append(news)

    def _ended(self, ended):
        match ended:
            case BlocksReleased(request):
                assert self.results[request].quarantined, "NIXL let go of what nobody was told it held"
                self.finish(request)
            case LoadResult(request, failure, quarantined):
                assert request not in self.results, "a load ended twice"
                self.results[request] = ended
                self.control.lease_renewer.stop_renewing(request, self.orders[request].engine)
                self.on_result(ended)
                if failure and not quarantined:
                    self.finish(request)

    def bytes_of(self, blocks):
        return [self.memories[0][block * self.pieces + piece] for block in blocks for piece in range(self.pieces)]

    def die(self):
        self.alive = False
        for link in (self.link, self.worker_link, *self.other_links):
            self.network.kill(link)


class Turns:
    """What has a ``now``, and a ``round`` in which everybody has a turn."""

    def run(self, seconds=0.0, step=0.5):
        """Let time pass; zero means: as long as messages travel back and forth, in no time."""
        end = self.now + seconds
        while True:
            for _ in range(6):
                self.round()
            if self.now >= end:
                return
            self.now = min(end, self.now + step)


class World(Turns):
    """A prefill and a decode engine, more on demand, stepped together."""

    engine = Engine

    def __init__(self, *, p=None, d=None):
        self.network = InMemoryNetwork()
        self.now = 0.0
        self.engines = []
        self.p, self.d = self.start("p0", 5600, **(p or {})), self.start("d0", 5700, **(d or {}))

    def start(self, name, port, **options):
        engine = self.engine(self.network, name, Address("10.0.0.1", port), **options)
        self.engines.append(engine)
        return engine

    def round(self):
        """Let every message in flight arrive, and every engine have one turn."""
        self.network.deliver()
        for engine in self.engines:
            engine.turn(now=self.now)

    def lend(self, request="a", blocks=3):
        return self.p.prefill(f"p-{request}", blocks, now=self.now)

    def start_renewing(self, offer, request="a"):
        self.d.control.lease_renewer.start_renewing(RequestId(f"d-{request}"), offer, now=self.now)

    def load(self, offer, request="a"):
        return self.d.load(f"d-{request}", offer, now=self.now)

    def release(self, offer, request="a"):
        self.d.control.lease_renewer.release(RequestId(f"d-{request}"), offer.remote_engine_id)


HELLO = Hello(
    PROTOCOL, EngineId("d0"), "scheduler", EngineId("p0"), "10.0.0.1", 5600, "10.0.0.1", b"nonce", (b"proof",)
)  # fmt: skip
