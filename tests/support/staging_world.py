"""A prefill engine that stages what it lends, and decode engines that read it, on the in-memory fabric.

P is made of the connector's cores. A decode engine is played: each of its ranks asks for the parts of a request, looks
at the slots at every moment at which a read could be under way, and asks the fence at the end.
"""

from dataclasses import dataclass

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, EngineEndpoint, EngineId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import (
    PROTOCOL,
    DropLeases,
    FenceResult,
    PartRefused,
    PartStaged,
    RankInfo,
    ReadDone,
    Region,
    RenewLeases,
    StagePart,
    Welcome,
    WorkerHello,
)
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.prefill_scheduler import StagingCoordinator
from pdrelay_connector.core.staging.slots import Slots
from pdrelay_connector.core.staging.worker import StagingWorker
from support.copying import MemoryCopier
from support.engines import FINGERPRINT, Turns
from support.in_memory import BLOCK_BYTES, InMemoryLink, InMemoryNetwork

LEASE, PATIENCE = 30.0, 60.0
BLOCKS, SLOTS = 24, 4  # of each KV cache group: blocks, and slots without slot 0
ADDRESS = Address("10.0.0.1", 5600)


def region(first, count, group):
    """One layer whose blocks are single pieces of the memory, from piece number ``first`` on."""
    return Region(
        base=first * BLOCK_BYTES, count=count, heads=1, tokens=1, width=BLOCK_BYTES, row_stride=BLOCK_BYTES,
        head_stride=BLOCK_BYTES, token_stride=BLOCK_BYTES, group=group,
    )  # fmt: skip


def right(request, group, number, rank):
    return f"{request}/{group}/{number}@{rank}".encode()


class HostBuffer:
    """The prefill engine: ``free`` and ``held`` share out its blocks."""

    def __init__(self, network, *, ranks, groups):
        self.network = network
        self.ranks = ranks
        self.groups = groups
        self.now = 0.0
        self.free = list(range(1, BLOCKS))
        self.held = {}
        self.serial = 0
        self.cache = [region(group * BLOCKS, BLOCKS, group) for group in range(groups)]
        after = groups * BLOCKS
        self.buffer = [region(after + group * (SLOTS + 1), SLOTS + 1, group) for group in range(groups)]
        for rank in range(ranks):
            network.memories[f"p/{rank}"] = [b"zero"] * (after + groups * (SLOTS + 1))
        self.link, self.counters, self.worker_tally = InMemoryLink(network, "p", engine="p"), Counters(), Counters()
        self.leases = LeaseTable(duration=LEASE, extension=LEASE * 2 / 3, same_engine=self.link.are_of_one_engine)
        self.lease_manager = LeaseManager(self.link, self.leases, self.counters)
        self.slots = Slots([SLOTS] * groups)
        tokens = {rank: f"token {rank}".encode() for rank in range(ranks)}
        self.staging_coordinator = StagingCoordinator(
            self.link,
            self.lease_manager,
            self.counters,
            WorkerLinks(self.link, tokens),
            self.slots,
            blocks=BLOCKS,
            read_timeout=PATIENCE,
        )
        self.copiers = [MemoryCopier(network, f"p/{rank}", self.cache, self.buffer) for rank in range(ranks)]
        self.worker_links = [InMemoryLink(network, f"p/{rank}", engine="p") for rank in range(ranks)]
        self.stagers = [
            StagingWorker(
                link,
                copier,
                self.worker_tally,
                scheduler_endpoint=EngineEndpoint(EngineId("p"), ADDRESS),
                hello=WorkerHello(rank, tokens[rank]),
            )
            for rank, (link, copier) in enumerate(zip(self.worker_links, self.copiers, strict=True))
        ]
        rank_infos = tuple(
            RankInfo(rank, ranks, f"p/{rank}".encode(), "DRAM", 0, tuple(self.buffer), staged=True)
            for rank in range(ranks)
        )
        network.listen(ADDRESS, self.link, Welcome(PROTOCOL, EngineId("p"), FINGERPRINT, rank_infos))

    def lend(self, blocks):
        """Compute a prompt into so many blocks of each group, and lease them; returns its name, or None when full."""
        if len(self.free) < blocks * self.groups:
            return None
        self.serial += 1
        request = RequestId(f"p-{self.serial}")
        self.held[request] = [[BlockId(self.free.pop(0)) for _ in range(blocks)] for _ in range(self.groups)]
        for rank, memory in enumerate(self.memories()):
            for group, ids in enumerate(self.held[request]):
                for number, block in enumerate(ids):
                    memory[group * BLOCKS + block] = right(request, group, number, rank)
        self.lease_manager.grant(request, now=self.now)
        return request

    def memories(self):
        return [self.network.memories[f"p/{rank}"] for rank in range(self.ranks)]

    def look(self, groups):
        """What is in these slots on every rank."""
        return [
            [
                memory[self.buffer[group].base // BLOCK_BYTES + slot]
                for group, slots in enumerate(groups)
                for slot in slots
            ]
            for memory in self.memories()
        ]

    def turn(self, *, now):
        self.now = now
        for event in self.link.poll():
            self.staging_coordinator.on(event, now=now)
        self.lease_manager.advance(now=now)
        self.staging_coordinator.advance(now=now)
        released = self.lease_manager.take_released()
        self.staging_coordinator.released(released)
        for lease in released:
            self._free(lease.request)
        for link, stager in zip(self.worker_links, self.stagers, strict=True):
            for event in link.poll():
                stager.on(event, now=now)
            stager.advance(now=now)

    def _free(self, request):
        """The engine gives the blocks to somebody else, who writes into them at once."""
        for group, ids in enumerate(self.held.pop(request)):
            for block in ids:
                for memory in self.memories():
                    memory[group * BLOCKS + block] = b"reused"
                self.free.append(block)

    def lose_worker(self, rank):
        """The connection between a worker and its scheduler breaks."""
        number = self.worker_links[rank].number
        wires = [wire for wire in self.network._wires if number in wire.ends]
        self.network._break(wires, ConnectionLost(None, "connection reset"))


@dataclass
class Load:
    """What one rank of a decode engine reads; ``parts`` are P's blocks and what is in them, on each rank of P."""

    request: RequestId
    reader: RequestId
    parts: list
    part: int = 0
    state: str = "asking"  # reading, confirming, done, failed
    slots: tuple = ()
    right: bool = True  # all that was seen so far
    reason: str = ""


class Caller:
    """What calls P, and calls again when the connection is lost."""

    def __init__(self, reads_from, name):
        self.p, self.link = reads_from, InMemoryLink(reads_from.network, name)
        self.conn, self.is_calling = None, False

    def turn(self):
        for event in self.link.poll():
            self.hear(event)
        if self.conn is None and not self.is_calling:
            self.link.connect(ADDRESS, EngineId("p"))
            self.is_calling = True

    def hear(self, event):
        match event:
            case PeerConnected(conn, _):
                self.conn = conn
                self.is_calling = False
            case ConnectFailed():
                self.is_calling = False
            case ConnectionLost():
                self.conn = None


class Worker(Caller):
    """One rank of a decode engine."""

    def __init__(self, reads_from, name, rank, ranks):
        super().__init__(reads_from, f"{name}/{rank}")
        self.rank, self.ranks = rank, ranks
        self.p.network.aliases[f"{name}/{rank}"] = name  # as its Hello would prove
        self.loads = {}
        self.asked = set()
        self.answered = []

    def start(self, load):
        self.loads[load.reader] = load
        self._ask(load)

    def turn(self):
        super().turn()
        for load in self.loads.values():
            self._look(load)

    def go_on(self, load):
        """The read of a part has ended."""
        self._look(load)
        load.part += 1
        if load.part < len(load.parts):
            self._ask(load)
        else:
            load.state = "confirming"
            self.link.send(self.conn, ReadDone(load.request, load.reader, self.rank, self.ranks))

    def hang_up(self):
        if self.conn is not None:
            self.link.close(self.conn)
            self._lost()

    def _ask(self, load):
        load.state = "asking"
        groups = tuple(tuple(ids) for ids in load.parts[load.part][0])
        self.asked.add((load.reader, load.part))
        self.link.send(self.conn, StagePart(load.request, load.reader, self.rank, self.ranks, load.part, groups))

    def hear(self, event):
        super().hear(event)
        match event:
            case ConnectionLost():
                self._lost()
            case MessageReceived(_, PartStaged(reader, part, slots)):
                load = self._answered(reader, part)
                load.state = "reading"
                load.slots = slots
            case MessageReceived(_, PartRefused(reader, part, reason)):
                load = self._answered(reader, part)
                load.state = "failed"
                load.reason = reason
            case MessageReceived(_, FenceResult(reader, held)):
                load = self.loads[reader]
                assert load.state == "confirming"
                assert load.right or not held, "wrong bytes were called right"
                load.state = "done" if held else "failed"

    def _answered(self, reader, part):
        assert (reader, part) in self.asked, "an answer nobody asked for"
        assert (reader, part) not in self.answered, "asked once, answered twice"
        self.answered.append((reader, part))
        load = self.loads[reader]
        assert (load.part, load.state) == (part, "asking")
        return load

    def _lost(self):
        self.conn = None
        for load in self.loads.values():
            if load.state in ("asking", "reading", "confirming"):
                load.state, load.reason = "failed", "the connection is lost"

    def _look(self, load):
        if load.state == "reading":
            load.right = load.right and self.p.look(load.slots) == load.parts[load.part][1]

    def unanswered(self):
        return [load for load in self.loads.values() if load.state in ("asking", "confirming")]


class Decoder(Caller):
    """A decode engine: its scheduler renews and drops, its workers read."""

    def __init__(self, p, name, ranks):
        super().__init__(p, name)
        self.name, self.ranks = name, ranks
        self.workers = [Worker(p, name, rank, ranks) for rank in range(ranks)]

    def turn(self):
        super().turn()
        for worker in self.workers:
            worker.turn()

    def say(self, kind, request):
        assert kind in (RenewLeases, DropLeases)
        self.link.send(self.conn, kind((request,)))


class StagingWorld(Turns):
    """One prefill engine, and decode engines with these numbers of ranks."""

    def __init__(self, *, ranks=1, groups=1, decoders=(1,)):
        self.network = InMemoryNetwork()
        self.now = 0.0
        self.serial = 0
        self.p = HostBuffer(self.network, ranks=ranks, groups=groups)
        self.decoders = [Decoder(self.p, f"d{number}", d_ranks) for number, d_ranks in enumerate(decoders)]
        self.run()

    def round(self):
        self.network.deliver()
        self.p.turn(now=self.now)
        for decoder in self.decoders:
            decoder.turn()

    def load(self, request, *, size, decoder=0, ranks=None):
        """Have a decode engine, or only some of its ranks, load a request in parts of ``size`` blocks a group."""
        self.serial += 1
        decoder = self.decoders[decoder]
        reader = RequestId(f"d-{self.serial}")
        held = self.p.held[request]
        parts = []
        for start in range(0, len(held[0]), size):
            ids = [blocks[start : start + size] for blocks in held]
            content = [
                [right(request, g, start + n, rank) for g, blocks in enumerate(ids) for n in range(len(blocks))]
                for rank in range(self.p.ranks)
            ]
            parts.append((ids, content))
        loads = []
        for worker in decoder.workers:
            if ranks is None or worker.rank in ranks:
                loads.append(Load(request, reader, parts))
                worker.start(loads[-1])
        return loads

    def read_started(self):
        """Every rank that reads a part now."""
        return [
            (worker, load)
            for decoder in self.decoders
            for worker in decoder.workers
            for load in worker.loads.values()
            if load.state == "reading"
        ]

    def go_on(self):
        """Every read that is under way ends."""
        for worker, load in self.read_started():
            worker.go_on(load)
        self.run()
