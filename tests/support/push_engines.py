"""Engines that push, made of the connector's real cores, an in-memory network and virtual time.

As in :mod:`support.engines`, vLLM's scheduler is played here. Every block of a decode engine knows to whom it is lent:
a write into any other fails at the very copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pdrelay_connector.core.control import ControlPlane
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, EngineEndpoint, EngineId, RequestId
from pdrelay_connector.core.layout.source_ranks import heads_of
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.kv_params import PushParams
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import PROTOCOL, Welcome
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.expected_push import PushOrder
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.push.push_job import ComputedBlocks, TransferOver
from pdrelay_connector.core.results import BlocksReleased, FellAsleep, LeaseLost, LoadResult
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.verify.comparison import compare, count
from pdrelay_connector.core.verify.sampling import Sampling
from pdrelay_connector.io.recovering_agent import OpenBackend, RecoveringAgent
from support.engines import BLOCK_SIZE, BLOCKS, FINGERPRINT, LEASE, NOTHING, Blocks, Turns, lent, rank_info
from support.in_memory import InMemoryLink, InMemoryNetwork, InMemoryTransferAgent, pieces_of
from support.memory_reader import MemoryReader

WAIT, WRITE, PATIENCE = 100.0, 20.0, 15.0  # s: registration_timeout, transfer_timeout, patience with a heartbeat
TCP = 900.0  # s that a cut network may last with its bytes still arriving afterwards
STRAYS = 10  # turns a living decode engine needs to take in what a dead prefill engine had sent
ORPHANED = 102.0  # s for which a kernel sends again what a dead process had sent into a cut


class WatchedMover(InMemoryTransferAgent):
    """Looks at every block it writes, and fails unless it is lent to the reader it was posted for."""

    def __init__(self, network, memory, world):
        super().__init__(network, memory)
        self.memory, self.world = memory, world
        self.reader = None  # for whom the next write is
        self.readers = {}  # flight -> reader

    def write(self, handle, spans):
        number = super().write(handle, spans)
        self.readers[id(self._xfers[number])] = self.reader
        return number

    def poll(self):
        self._give_up_what_tcp_gave_up()
        if self._network.reachable(self.memory):
            return super().poll()
        stuck, self.stuck = self.stuck, True  # nothing leaves a machine that is cut off
        clinging = self.clinging
        self.clinging = True
        ended = super().poll()
        self.stuck, self.clinging = stuck, clinging
        return ended

    def _give_up_what_tcp_gave_up(self):
        if self.world.cut_at is not None and self.world.now >= self.world.cut_at + TCP:
            for flight in self._xfers.values():
                flight.landing, flight.cancelled = False, True

    def _copy(self, flight):
        pieces = [remote for remote, _ in pieces_of(flight.spans)]
        self.world.check_write(flight.memory, pieces, self.readers[id(flight)])
        super()._copy(flight)


class WatchedRecovery(RecoveringAgent):
    """Tells each backend for whom it writes, also when it writes again."""

    reader = None  # for whom the next write is

    def _begin(self, handle, spans, *, is_read):
        self.readers = getattr(self, "readers", {})
        number = super()._begin(handle, spans, is_read=is_read)
        self.readers.setdefault(number, self.reader)
        return number

    def _post(self, transfer, now):
        self._present.agent.reader = self.readers.setdefault(transfer.number, self.reader)
        super()._post(transfer, now)


class WatchedWriter(PushWriter):
    """Tells its mover for whom it writes."""

    def _post(self, writing, source, until, now):
        self._transfer_agent.reader = writing.order.reader
        super()._post(writing, source, until, now)


@dataclass
class Prefill:
    """A prompt that P computes: ``ids`` are the blocks it has."""

    name: RequestId
    blocks: int
    prompt: str | None
    ids: list = field(default_factory=list)
    attempt: int = 0
    announced: int = 0


@dataclass
class PushEngine(Blocks):
    """One engine process that can be P or D. ``free``, ``computing``, ``held`` and ``into`` share out its blocks."""

    world: "PushWorld"
    name: str
    address: Address
    ranks: int = 1
    heads: int = 1  # KV heads of the model; with fewer than ranks, ranks share one
    wait: float = WAIT
    alive: bool = True
    frozen: bool = False
    sampling: Sampling = NOTHING
    is_busy: bool = False  # its workers run a long step: what the scheduler tells them with the next one waits
    computing: dict = field(default_factory=dict)
    held: dict = field(default_factory=dict)
    freed: list = field(default_factory=list)
    results: dict = field(default_factory=dict)
    tickets: dict = field(default_factory=dict)
    slept: list = field(default_factory=list)  # what came of each attempt to sleep
    into: dict = field(default_factory=dict)
    lent: dict = field(default_factory=dict)  # block -> request for which P may write into it
    on_result: Callable[[LoadResult], None] = lambda result: None
    on_lost: Callable[[RequestId], None] = lambda request: None

    def __post_init__(self):
        network, name = self.world.network, self.name
        self.free = list(range(1, BLOCKS + 1))
        self.pieces = max(self.heads // self.ranks, 1)  # of a block on one rank: one for each head
        memory = [b"zero"] * (BLOCKS + 1) * self.pieces
        self.memories = [network.memories.setdefault(f"{name}/{rank}", list(memory)) for rank in self.ranks_()]
        network.memories[name] = []
        self.link, self.counters = InMemoryLink(network, name, engine=name), Counters()
        self.peers = PeerTable(self.link, FINGERPRINT, self.counters, retry_after=1.0)
        self.leases = LeaseTable(duration=LEASE, extension=LEASE * 2 / 3, same_engine=self.link.are_of_one_engine)
        lease_manager = LeaseManager(self.link, self.leases, self.counters)
        lease_renewer = LeaseRenewer(self.link, self.peers, self.counters, heartbeat_interval=LEASE / 6)
        infos = [
            rank_info(f"{name}/{rank}", rank=rank, ranks=self.ranks, all_heads=self.heads) for rank in self.ranks_()
        ]
        tokens = {rank: f"{name}/{rank}".encode() for rank in self.ranks_()}
        self.push_coordinator = PushCoordinator(
            self.link, lease_manager, self.counters, tokens=tokens, registration_timeout=self.wait
        )
        self.push_receiver = PushReceiver(
            self.link, self.peers, lease_renewer, self.counters, infos, timeout=self.wait, peer_timeout=PATIENCE
        )
        self.control = ControlPlane(
            lease_manager,
            lease_renewer,
            self.peers,
            self.counters,
            push_coordinator=self.push_coordinator,
            push_receiver=self.push_receiver,
            close_all=self.link.close_all,
        )
        self.worker_links = [InMemoryLink(network, f"{name}/{rank}", engine=name) for rank in self.ranks_()]
        self.worker_tally = Counters()
        self.movers = []  # the backends that its workers have built
        recovering = [
            WatchedRecovery(
                self._build(rank).agent,
                partial(self._build, rank),
                self.worker_tally,
                timeout=WRITE,
                clock=lambda: self.world.now,
            )
            for rank in self.ranks_()
        ]
        self.caches = [
            MemoryReader(memory, shape=f"{rank} of {self.ranks}", pieces=self.pieces, size=BLOCK_SIZE)
            for rank, memory in enumerate(self.memories)
        ]
        self.writers = [
            WatchedWriter(
                link,
                agent,
                self.worker_tally,
                info,
                scheduler_endpoint=EngineEndpoint(name, self.address),
                token=tokens[info.rank],
                timeout=WRITE,
                sampling=self.sampling,
                cache=cache,
            )
            for link, agent, info, cache in zip(self.worker_links, recovering, infos, self.caches, strict=True)
        ]
        self.announced, self.on_their_way = [], []  # pieces, which the workers receive with the step after the next
        network.listen(self.address, self.link, Welcome(PROTOCOL, EngineId(name), FINGERPRINT, tuple(infos)))

    def ranks_(self):
        return range(self.ranks)

    def _build(self, rank):
        self.movers.append(mover := WatchedMover(self.world.network, f"{self.name}/{rank}", self.world))
        return OpenBackend(mover, lambda: None)

    # ---- P's scheduler

    def begin(self, name, blocks, prompt="digest"):
        """A prefill enters the scheduler; False where that name is taken."""
        if name in self.held or any(prefill.name == name for prefill in self.computing.values()):
            return False
        self.computing[name] = Prefill(RequestId(name), blocks, prompt)
        return True

    def compute(self, name, blocks):
        """One step: tell what the steps before have completed, compute some more; False when full."""
        prefill = self.computing[name]
        self._announce(prefill, last=False)
        blocks = min(blocks, prefill.blocks - len(prefill.ids))
        if len(self.free) < blocks:
            return False
        for _ in range(blocks):
            block = self.free.pop(0)
            for rank, memory in enumerate(self.memories):
                for number, head in enumerate(range(*heads_of(self.heads, self.ranks, rank))):
                    memory[block * self.pieces + number] = right(name, len(prefill.ids), head)
            prefill.ids.append(block)
        return True

    def preempt(self, name):
        """Take the blocks away: others may have them at once."""
        prefill = self.computing[name]
        self._free(prefill.ids)
        prefill.ids = []
        prefill.announced = 0
        prefill.attempt += 1

    def abandon(self, name):
        """The prefill is aborted."""
        prefill = self.computing.pop(name)
        self._free(prefill.ids)
        self.announced.append((prefill, TransferOver(prefill.name)))
        self.control.push_coordinator.abandoned(RequestId(name), now=self.world.now)

    def lend(self, name, *, now):
        """The prefill is done: grant the lease; the workers hear of the last blocks with the next step."""
        prefill = self.computing[name]
        if not self.compute(name, prefill.blocks):
            return False
        self.held[RequestId(name)] = prefill.ids
        del self.computing[name]
        self.control.grant(RequestId(name), now=now)
        self._announce(prefill, last=True)
        return True

    def _announce(self, prefill, *, last):
        new = [BlockId(block) for block in prefill.ids[prefill.announced :]]
        prefill.announced += len(new)
        if new or last:
            tokens = len(prefill.ids) * BLOCK_SIZE
            self.announced.append(
                (prefill, ComputedBlocks(prefill.name, prefill.prompt, prefill.attempt, [new], tokens, last))
            )

    # ---- D's scheduler

    def expect(self, request, name, engine, blocks, *, now, first=0, prompt="digest"):
        """Allocate blocks and lend them to P; None when full."""
        wanted = blocks - first
        if len(self.free) < wanted:
            return None
        into = self.into[RequestId(request)] = [BlockId(self.free.pop(0)) for _ in range(wanted)]
        for block in into:
            self.lent[block] = request
            self._fill(block, b"fresh")
        groups = lent(first, into)
        ticket = PushOrder(RequestId(request), RequestId(name), EngineId(engine.name), engine.address, prompt, groups)
        self.tickets[ticket.request] = ticket
        self.push_receiver.expect(ticket, now=now)
        return into

    def start_renewing(self, request, name, engine, *, now):
        booking = PushParams(EngineId(engine.name), *engine.address, name, RequestId(name))
        self.control.lease_renewer.start_renewing(RequestId(request), booking, now=now)

    # ---- both

    def turn(self, *, now):
        """One turn of every thread, then what the engine thread does with the outcome."""
        if not self.alive or self.frozen:
            return
        self._turn_of(self.link, self.control, now)
        news = self.control.take_results(now=now)
        if not self.is_busy:
            on_their_way, self.on_their_way = self.on_their_way, self.announced
            self.announced = []
            for prefill, piece in on_their_way:
                self._deliver(prefill, piece, now)
        for link, writer in zip(self.worker_links, self.writers, strict=True):
            self._turn_of(link, writer, now)
        for each in news:
            self._ended(each)

    def _deliver(self, prefill, piece, now):
        for writer in self.writers:
            writer.add_computed(piece, now=now)

    def _turn_of(self, link, core, now):
        for event in link.poll():
            core.on(event, now=now)
        core.advance(now=now)

    def _ended(self, news):
        match news:
            case LeaseEnded(request):
                self.freed.append(news)
                self._free(self.held.pop(request))
                self.announced.append((None, TransferOver(request)))
            case LeaseLost(request):
                self.on_lost(request)
            case FellAsleep():
                self.slept.append(news)
            case BlocksReleased(request):
                assert self.results[request].quarantined, "P let go of what nobody was told it held"
                self._take_back(request)
                self.finish(request)
            case LoadResult(request, failure, quarantined, checks):
                assert request not in self.results, "a load ended twice"
                if checks is not None:  # as each worker does before it reports the load to vLLM
                    comparisons = [compare(*each) for each in self._compared(checks)]
                    failure = "".join(each.failure for each in comparisons)
                    for each in comparisons:
                        count(each, self.worker_tally)
                    news = news._replace(failure=failure)
                self.results[request] = news
                if not quarantined:
                    self._take_back(request)
                self.on_result(news)
                if failure and not quarantined:
                    self.finish(request)

    def _compared(self, checks):
        """Return what each rank compares."""
        for rank, cache in enumerate(self.caches):
            sums = next((each for each in checks.sums if each.worker == rank), checks.sums[0])
            yield sums, checks.token_ranges, cache

    def _take_back(self, request):
        for block in self.into[request]:
            assert self.lent.pop(block) == request

    def owned(self):
        return [*super().owned(), *(prefill.ids for prefill in self.computing.values())]

    def die(self):
        """The process ends. What its workers had on their way may still arrive."""
        self.alive = False
        for mover in self.movers:
            self.world.strays += [Stray(mover, flight, self.world.now) for flight in mover._xfers.values()]
        for link in (self.link, *self.worker_links):
            self.world.network.kill(link)

    def bytes_of(self, blocks):
        places = [block * self.pieces + piece for block in blocks for piece in range(self.pieces)]
        return [[memory[place] for place in places] for memory in self.memories]


class Stray:
    """Bytes that outlive the process that sent them, for a while."""

    def __init__(self, mover, flight, now):
        source = mover._network.memories[mover.memory]
        self.source = mover.memory
        self.target = flight.memory
        self.ends_at = now + ORPHANED
        self.reader = mover.readers[id(flight)]
        self.turns = 0
        self.bytes = {remote: source[local] for remote, local in pieces_of(flight.spans)}


def right(name, number, head):
    return f"{name}/{number}@{head}".encode()


def right_bytes(name, numbers, ranks, heads=None):
    """What the ranks of an engine should hold of some blocks; if nothing is said, each has a head of its own."""
    kept = [range(*heads_of(ranks if heads is None else heads, ranks, rank)) for rank in range(ranks)]
    return [[right(name, number, head) for number in numbers for head in each] for each in kept]


class PushWorld(Turns):
    """A prefill and a decode engine, more on demand, stepped together."""

    def __init__(self, *, ranks=1, d_ranks=None, heads=None, sampling=NOTHING):
        """P has ``ranks``, and if nothing is said D as many, and the model as many heads."""
        self.network = InMemoryNetwork()
        self.now = 0.0
        self.ranks = {"p": ranks, "d": d_ranks or ranks}
        self.heads = heads or max(self.ranks.values())
        self.cut_at = None
        self.sampling = sampling
        self.engines, self.strays = [], []
        self.p, self.d = self.start("p0", 5600), self.start("d0", 5700)

    def start(self, name, port):
        engine = PushEngine(
            self, name, Address("10.0.0.1", port), self.ranks[name[0]], self.heads, sampling=self.sampling
        )
        self.engines.append(engine)
        return engine

    def check_write(self, memory, pieces, reader):
        """Fail unless the blocks of these pieces are lent to the reader at this very moment."""
        owner = next(engine for engine in self.engines if f"{engine.name}/" == memory[: len(engine.name) + 1])
        for block in {int(piece) // owner.pieces for piece in pieces}:
            lent_to = owner.lent.get(block)
            assert lent_to == reader, f"P wrote into block {block} for {reader}; it is lent to {lent_to}"

    def cut(self, engine, part, *, is_cut=True):
        """Cut the control connections or the bytes of an engine, or both."""
        links = [engine.link] * (part != "bytes") + engine.worker_links * (part != "control")
        for link in links:
            self.network.cut(link, is_cut=is_cut)
        if is_cut and self.cut_at is None:
            self.cut_at = self.now

    def heal(self):
        """End whatever was wrong."""
        self.cut_at = None
        for engine in self.engines:  # those that died as well: nobody waits for them behind a cut
            engine.frozen = engine.is_busy = False
            for link in (engine.link, *engine.worker_links):
                self.network.cut(link, is_cut=False)
            for mover in engine.movers:
                mover.stuck = mover.clinging = mover.broken = False

    def round(self):
        """Let every message in flight arrive, and every engine have one turn."""
        self.network.deliver()
        for engine in self.engines:
            engine.turn(now=self.now)
        for stray in list(self.strays):
            self._stray(stray)

    def _stray(self, stray):
        owner = next(engine for engine in self.engines if f"{engine.name}/" == stray.target[: len(engine.name) + 1])
        is_cut = any(self.network.is_cut(memory) for memory in (stray.source, stray.target))
        if not owner.alive or (is_cut and self.now >= stray.ends_at):
            self.strays.remove(stray)
        elif not is_cut and not owner.frozen:
            stray.turns += 1
            if stray.turns >= STRAYS:
                self.strays.remove(stray)
                self.check_write(stray.target, stray.bytes, stray.reader)
                for block, data in stray.bytes.items():
                    self.network.memories[stray.target][block] = data

    def right_bytes(self, name, numbers):
        """What D's ranks should hold of some blocks of a transfer."""
        return right_bytes(name, numbers, self.ranks["d"], self.heads)

    # ---- short forms for stories

    def prefill(self, name="t", blocks=3, *, chunk=None):
        """Compute a whole prompt, or only a chunk of it."""
        if name not in self.p.computing:
            assert self.p.begin(name, blocks, "digest")
        if chunk is None:
            assert self.p.lend(name, now=self.now)
        else:
            assert self.p.compute(name, chunk)

    def start_renewing(self, request="d-a", name="t", engine=None):
        self.d.start_renewing(request, name, engine or self.p, now=self.now)

    def expect(self, request="d-a", name="t", blocks=3, **options):
        """As the scheduler does for a request that arrives and is admitted."""
        engine = options.pop("engine", self.p)
        self.d.start_renewing(request, name, engine, now=self.now)
        return self.d.expect(request, name, engine, blocks, now=self.now, **options)

    def stop(self, request="d-a"):
        self.d.push_receiver.stop(RequestId(request))
