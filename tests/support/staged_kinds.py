"""Pairs of :mod:`support.async_kinds` whose KV goes through host memory (``host_staging``), in pull or in push.

The buffers in host memory are the connector's own, and have few slots. Their copies are played: as on a GPU, one into
the cache waits for the steps that were begun before it; any is done when the test's dice say so.
"""

import itertools
import warnings
from collections import deque

from pdrelay_connector.core.ids import EngineEndpoint, EngineId
from pdrelay_connector.core.messages import RankInfo, WorkerHello
from pdrelay_connector.core.ports import CopyResult
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.staging.slots import HostBuffer, Slots
from pdrelay_connector.core.staging.worker import StagingWorker
from support.async_kinds import AsyncEngine, AsyncPair
from support.engines import FINGERPRINT
from support.scheduled_engine import TRANSFER, InMemoryRunner

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches
    from pdrelay_connector.shell.engine_config import WorkerRank
    from pdrelay_connector.shell.host_staging import StagingBuffer, copy_on_host
    from pdrelay_connector.shell.worker import PDRelayConnectorWorker


class StreamCopier:
    """Implements :class:`~pdrelay_connector.core.ports.Copier`; some copies fail."""

    def __init__(self, engine, buffer):
        self.engine, self.buffer = engine, buffer
        self.jobs, self._numbers = deque(), itertools.count(1)

    def out(self, blocks, slots):
        """Queue a copy from the cache."""
        return self._post(blocks, slots, "d2h")

    def into(self, slots, blocks):
        """Queue a copy into the cache."""
        return self._post(blocks, slots, "h2d")

    def _post(self, blocks, slots, direction):
        self.jobs.append((next(self._numbers), blocks, slots, direction))
        return self.jobs[-1][0]

    def poll(self):
        """Have some copies done."""
        ended = []
        world = self.engine.world
        while self.jobs and world.dice.random() < world.copies:
            number, blocks, slots, direction = self.jobs.popleft()
            if direction == "h2d" and self.engine.in_flight:
                self.engine.compute_until(self.engine.in_flight[-1])
            failure = "a device error" if world.dice.random() < world.copies_fail else ""
            moved = 0 if failure else self.buffer.copy(copy_on_host, blocks, slots, direction)
            world.counts["copies failed" if failure else direction] += 1
            ended.append(CopyResult(number, failure, moved))
        return ended


class StagedProcess:
    """One of an engine's workers, whose transfer thread only reads or only writes, and its stager."""

    def __init__(self, engine, handshake, settings):
        self.info, mode = handshake.rank, engine.world.mode
        lends, takes = engine.buffers[self.info.rank]
        config = engine.connector._engine_config
        counters = engine.worker_counters
        link = engine.make_link(handshake)
        scheduler = EngineEndpoint(EngineId(engine.agent), engine.address)
        self.worker = PDRelayConnectorWorker(config, settings, WorkerRank(self.info.rank))
        if mode == "push":
            staging = HostBuffer(Slots(lends.slots), StreamCopier(engine, lends))
            writer = PushWriter(
                link, engine.make_agent(handshake.rank), counters, handshake.rank, scheduler_endpoint=scheduler,
                token=handshake.token, timeout=TRANSFER, staging=staging,
            )  # fmt: skip
            self.runner = self.worker._threads.writer = InMemoryRunner(writer, link)
        else:
            staging = HostBuffer(Slots(takes.slots), StreamCopier(engine, takes))
            peers = PeerTable(link, FINGERPRINT, counters, retry_after=settings.retry_after)
            agent = engine.make_agent(handshake.landing)
            reader = PullReader(link, agent, peers, counters, handshake.landing, timeout=TRANSFER, staging=staging)
            self.runner = self.worker._threads.reader = InMemoryRunner(reader, link, self.worker._after_turn)
        hello = WorkerHello(self.info.worker, handshake.token, receives_pushes=mode == "push")
        copier = StreamCopier(engine, takes if mode == "push" else lends)
        link = engine.make_link(handshake)
        stager = StagingWorker(link, copier, counters, scheduler_endpoint=scheduler, hello=hello)
        self.stager = InMemoryRunner(stager, link)


class StagedEngine(AsyncEngine):
    """One engine whose KV goes through host memory."""

    def configure(self, config):
        super().configure(config)
        transfer, world = config.kv_transfer_config, self.world
        staged = {"mode": world.mode, "host_staging": True, "staging_blocks": world.slots, "return_kv": False}
        transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | staged

    def make_layers(self, engine_config):
        self.buffers = []
        return super().make_layers(engine_config)

    def describe(self, rank, caches, memory, described):
        slots = described.staging_blocks
        both = [StagingBuffer(caches, described.layers, blocks=self.shape.blocks, slots=slots) for _ in range(2)]
        self.buffers.append(both)
        return [
            RankInfo(rank, self.shape.ranks, memory.encode(), "DRAM", 0, regions, staged=True)
            for buffer in both
            for regions in [
                buffer.regions(lambda some, blocks: describe_caches(some, described, blocks, KernelLayout.ENTRIES))
            ]
        ]

    def start_process(self, handshake, settings):
        return StagedProcess(self, handshake, settings)

    def turn_of_threads(self, now):
        super().turn_of_threads(now)
        self._wake_copiers(now)
        return []

    def _transfer(self):
        super()._transfer()
        if self.world.dice.random() < 0.5:
            self._wake_copiers(self.world.now)

    def _wake_copiers(self, now):
        """Copies wake the threads that ordered them."""
        for process in self.processes:
            process.stager.wake(now)
            process.runner.wake(now)


class StagedPair(AsyncPair):
    """KV of both engines goes through host memory.

    ``copies``: how often one is done; ``copies_fail``: how many. ``losses``: how often all connections break.
    """

    engine_class = StagedEngine
    mode, slots = "pull", 4
    rest = 130.0  # longer than a quarantine
    copies = 0.3
    copies_fail = 0.05
    losses = 0.03

    @property
    def modes(self):
        """How requests come."""
        return (self.mode, self.mode, self.mode, "d", "p")

    def round(self, *, but=None):
        """Transfers stand still now and then; bytes of those that are given up may still land."""
        for mover in (*self.p.movers, *self.d.movers):
            if (chance := self.dice.random()) < 0.1:
                mover.stuck, mover.clinging = True, self.dice.random() < 0.5
            elif chance > 0.7:
                mover.stuck = mover.clinging = False
        if self.dice.random() < self.losses:
            self.network.lose()
        super().round(but=but)

    def heal(self):
        """End whatever is wrong."""
        super().heal()
        self.losses = 0.0
