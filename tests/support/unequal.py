"""Engines of unequal shapes, made of the connector's real cores and an in-memory network.

A piece of the fabric is :data:`UNIT` tokens of one head. Every piece of a prompt has a name of its own, so that what is
in a decode engine's memory says where it is from.
"""

from typing import NamedTuple

from pdrelay_connector.core.control import ControlPlane
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, EngineEndpoint, EngineId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.layout.source_ranks import heads_of
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.kv_params import PushParams
from pdrelay_connector.core.lease.lease_table import LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import PROTOCOL, LentBlocks, RankInfo, Region, Welcome
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.expected_push import PushOrder
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.push.push_job import ComputedBlocks
from pdrelay_connector.core.session.peers import PeerTable
from support.engines import FINGERPRINT, LEASE, TIMEOUT, Turns
from support.in_memory import BLOCK_BYTES, InMemoryLink, InMemoryNetwork, InMemoryTransferAgent

UNIT = 4  # tokens of one head in a piece
P, D = EngineId("p0"), EngineId("d0")
HOME = {P: Address("10.0.0.1", 5600), D: Address("10.0.0.1", 5700)}
A, T = RequestId("d-a"), RequestId("t")


class Shape(NamedTuple):
    """How one engine keeps its KV."""

    ranks: int = 1
    sizes: tuple = (UNIT,)  # tokens of a block of each KV cache group
    stages: tuple = ()  # layers of each pipeline stage; nothing: all are in one

    @property
    def workers(self):
        return self.ranks * max(1, len(self.stages))


class Model(NamedTuple):
    """What both engines agree on: KV heads of a layer, how far the layers of each group look back (0: always)."""

    heads: int = 1
    windows: tuple = (0,)
    depth: int = 1  # layers of each group

    @property
    def layers(self):
        """Return (group, number) of each layer, in order: those of the groups take turns."""
        return [(group, number) for number in range(self.depth) for group in range(len(self.windows))]


class Engine:
    """One engine's ranks and their memories. Its groups take turns in one pool of blocks, as vLLM's do."""

    def __init__(self, network, name, model, shape, blocks):
        self.network = network
        self.name = name
        self.model = model
        self.shape = shape
        self.blocks = blocks
        self.groups = [CacheGroup(size, w) for size, w in zip(shape.sizes, model.windows, strict=True)]
        layers = iter(model.layers)
        self.layers = [[next(layers) for _ in range(count)] for count in shape.stages or (len(model.layers),)]
        self.infos = [self._info(stage, rank) for stage in range(len(self.layers)) for rank in range(shape.ranks)]
        for info in self.infos:
            pieces = sum(self.pieces_of_block(group) for group, _ in self.layers[info.stage]) * blocks
            network.memories[info.agent.decode()] = [b"before"] * pieces
        self.link, self.counters = InMemoryLink(network, name, engine=name), Counters()
        network.memories[name] = []
        self.peers = PeerTable(self.link, FINGERPRINT, self.counters, retry_after=1.0, ranks=self.infos)
        self.lease_manager = LeaseManager(self.link, LeaseTable(duration=LEASE, extension=LEASE * 2 / 3), self.counters)
        self.lease_renewer = LeaseRenewer(self.link, self.peers, self.counters, heartbeat_interval=LEASE / 6)
        tokens = {info.worker: info.agent for info in self.infos}
        self.push_coordinator = PushCoordinator(
            self.link, self.lease_manager, self.counters, tokens=tokens, registration_timeout=100.0
        )
        self.push_receiver = PushReceiver(
            self.link, self.peers, self.lease_renewer, self.counters, self.infos, timeout=100.0, peer_timeout=15.0
        )
        self.cores = []  # (link, core) of every thread
        self.movers = [InMemoryTransferAgent(network, info.agent.decode()) for info in self.infos]
        network.listen(HOME[name], self.link, Welcome(PROTOCOL, name, FINGERPRINT, tuple(self.infos)))

    @property
    def heads(self):
        """Of one rank."""
        return max(self.model.heads // self.shape.ranks, 1)

    def pieces_of_block(self, group):
        return self.heads * self.shape.sizes[group] // UNIT

    def first_piece(self, stage, layer):
        before = self.layers[stage][: self.layers[stage].index(layer)]
        return sum(self.pieces_of_block(group) for group, _ in before) * self.blocks

    def _info(self, stage, rank):
        entry = BLOCK_BYTES // UNIT
        regions = tuple(
            Region(
                base=self.first_piece(stage, (group, number)) * BLOCK_BYTES,
                count=self.blocks,
                heads=self.heads,
                tokens=size,
                width=entry,
                row_stride=self.pieces_of_block(group) * BLOCK_BYTES,
                head_stride=size * entry,
                token_stride=entry,
                group=group,
                all_heads=self.model.heads,
                layer=f"{number}.{group}",
            )
            for group, number in self.layers[stage]
            for size in [self.shape.sizes[group]]
        )
        agent = f"{self.name}/{stage * self.shape.ranks + rank}".encode()
        return RankInfo(rank, self.shape.ranks, agent, "DRAM", 0, regions, stage=stage, stages=len(self.layers))

    def piece(self, stage, layer, block, head, token):
        """Return the number of a piece, in the memory of a rank whose head number ``head`` that is."""
        group = layer[0]
        size = self.shape.sizes[group]
        within = head * size // UNIT + token % size // UNIT
        return self.first_piece(stage, layer) + block * self.pieces_of_block(group) + within

    def tables(self, tokens, after=0):
        """Allocate blocks for so many tokens in every group, scattered and none twice."""
        free = iter(range(self.blocks - 1, after, -1))
        return [[BlockId(next(free)) for _ in range(-(-tokens // size))] for size in self.shape.sizes]

    def memory(self, worker):
        return self.network.memories[f"{self.name}/{worker}"]

    def heads_on(self, rank):
        return range(*heads_of(self.model.heads, self.shape.ranks, rank))

    def places(self, info, group, table, start, stop):
        """Return (name, piece) of everything a worker keeps of the tokens from ``start`` to ``stop`` of a group."""
        size = self.shape.sizes[group]
        for layer in self.layers[info.stage]:
            for token in range(start // UNIT * UNIT, stop, UNIT) if layer[0] == group else ():
                for number, head in enumerate(self.heads_on(info.rank)):
                    name = f"{layer}: head {head} of tokens from {token}".encode()
                    yield name, self.piece(info.stage, layer, table[token // size], number, token)

    def turn(self, *, now):
        for link, core in self.cores:
            for event in link.poll():
                core.on(event, now=now)
            core.advance(now=now)


class UnequalWorld(Turns):
    """A prefill engine that has a prompt and a decode engine that lacks the end of it."""

    def __init__(self, model=None, p=None, d=None, *, prompt=22, external=None, blocks=64):
        self.network = InMemoryNetwork()
        self.now = 0.0
        model = model or Model()
        self.p = Engine(self.network, P, model, p or Shape(), blocks)
        self.d = Engine(self.network, D, model, d or Shape(), blocks + 7)
        self.prompt = prompt
        self.external = prompt - 1 if external is None else external
        self.source, self.target = self.p.tables(prompt), self.d.tables(prompt, after=9)
        self.loaded = []  # what each rank of D says, in pull; what D says, in push
        for info in self.p.infos:
            for group, table in enumerate(self.source):
                for name, piece in self.p.places(info, group, table, 0, len(table) * self.p.shape.sizes[group]):
                    self.p.memory(info.worker)[piece] = name
        for group, table in zip(self.p.groups, self.source, strict=True):
            gone = group.first_needed(prompt - 1) // group.block_size
            table[:gone] = [BlockId(0)] * gone  # what fell out of the window is another's now

    def missing_tokens(self):
        return [group.missing_tokens(self.prompt, self.external) for group in self.d.groups]

    def round(self):
        self.network.deliver()
        self.p.turn(now=self.now)
        self.d.turn(now=self.now)

    # ---- pull

    def pull(self):
        """Lend the prompt, and have every rank of D read what it lacks."""
        p, d = self.p, self.d
        p.cores = [(p.link, ControlPlane(p.lease_manager, p.lease_renewer, p.peers, p.counters))]
        p.lease_manager.grant(T, now=self.now)
        self.readers = [self._reader(info, mover) for info, mover in zip(d.infos, d.movers, strict=True)]
        for reader in self.readers:
            reader.load(LoadOrder(A, T, P, HOME[P], self.token_ranges()), now=self.now)

    def _reader(self, info, mover):
        link = InMemoryLink(self.network, f"{D}/{info.worker}", engine=D)
        counters = Counters()
        peers = PeerTable(link, FINGERPRINT, counters, retry_after=1.0)
        reader = PullReader(link, mover, peers, counters, info, timeout=TIMEOUT)
        self.d.cores.append((link, reader))
        return reader

    def token_ranges(self):
        """Return what the decode engine's scheduler orders."""
        found = []
        for number, (start, stop) in enumerate(self.missing_tokens()):
            if start < stop:
                remote = self.source[number][self.p.groups[number].blocks_of(start, stop)]
                local = self.target[number][self.d.groups[number].blocks_of(start, stop)]
                found.append(TokenRange(number, start, stop, remote, local))
        return tuple(found)

    # ---- push

    def push(self):
        """Start both engines' threads, and have D register what it lacks."""
        p, d = self.p, self.d
        control = ControlPlane(
            p.lease_manager, p.lease_renewer, p.peers, p.counters, push_coordinator=p.push_coordinator
        )
        p.cores = [(p.link, control)]
        self.writers = []
        for info, mover in zip(p.infos, p.movers, strict=True):
            link = InMemoryLink(self.network, f"{P}/{info.worker}", engine=P)
            self.writers.append(
                PushWriter(
                    link,
                    mover,
                    p.counters,
                    info,
                    scheduler_endpoint=EngineEndpoint(P, HOME[P]),
                    token=info.agent,
                    timeout=TIMEOUT,
                )
            )
            p.cores.append((link, self.writers[-1]))
        d.cores = [
            (d.link, ControlPlane(d.lease_manager, d.lease_renewer, d.peers, d.counters, push_receiver=d.push_receiver))
        ]
        d.lease_renewer.start_renewing(A, PushParams(P, *HOME[P], T, T), now=self.now)
        lent = [
            LentBlocks(start, stop, tuple(self.target[number][d.groups[number].blocks_of(start, stop)]))
            if start < stop else LentBlocks(start, start, ())
            for number, (start, stop) in enumerate(self.missing_tokens())
        ]  # fmt: skip
        d.push_receiver.expect(PushOrder(A, T, P, HOME[P], None, tuple(lent)), now=self.now)
        self.announced = [0] * len(p.groups)

    def compute(self, tokens, *, last=False):
        """Tell P's workers how far the prompt is computed."""
        if last:
            self.p.push_coordinator._lease_manager.grant(T, now=self.now)
            self.p.push_coordinator.granted(T, now=self.now)
        pieces = []
        for number, (group, table) in enumerate(zip(self.p.groups, self.source, strict=True)):
            complete = len(table) if last else tokens // group.block_size
            pieces.append(table[self.announced[number] : complete])
            self.announced[number] = complete
        for writer in self.writers:
            writer.add_computed(ComputedBlocks(T, None, 0, pieces, tokens, last), now=self.now)

    # ---- what came of it

    def results(self):
        """Return what D heard of the request, from each of its ranks (pull) or of all (push)."""
        found = [reader.take_results() for reader in getattr(self, "readers", ())] or [
            self.d.push_receiver.take_results()
        ]
        return [result for each in found for result in each]

    def check(self):
        """Check every piece of the decode engine's memory: what was lacking is there, and nothing else is touched."""
        for info in self.d.infos:
            found = self.d.memory(info.worker)
            wanted = [b"before"] * len(found)
            for group, (start, stop) in enumerate(self.missing_tokens()):
                unit = min(self.p.shape.sizes[group], self.d.shape.sizes[group])
                if start < stop:  # whole rows of the side with the smaller ones move
                    rows = start // unit * unit, -(-stop // unit) * unit
                    for name, piece in self.d.places(info, group, self.target[group], *rows):
                        wanted[piece] = name
            wrong = [(piece, f, w) for piece, (f, w) in enumerate(zip(found, wanted, strict=True)) if f != w]
            assert wrong == [], "(piece, what is there, what should be)"
