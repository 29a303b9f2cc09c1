"""Engines with vLLM's own scheduler and block pool, our whole connector, an in-memory network and virtual time.

Played are the model, which writes into each token's place in memory what all tokens up to it make of it, and the loop
and the threads, which have a turn when the test says so. Every token is computed from KV that is compared with what it
must be, byte for byte.
"""

import copy
import dataclasses
import functools
import hashlib
import tempfile
import warnings
from collections import Counter, deque
from pathlib import Path
from typing import ClassVar, NamedTuple

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import EngineEndpoint, EngineId
from pdrelay_connector.core.messages import PROTOCOL, Welcome
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.returning_writer import ReturningWriter
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.sleep import in_generation
from pdrelay_tools.local.model import ensure_model
from support.engines import BLOCK_SIZE, FINGERPRINT, rank_info
from support.in_memory import BLOCK_BYTES, InMemoryLink, InMemoryTransferAgent, pieces_of
from support.push_engines import WatchedMover

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        make_block_hash_with_group_id,
    )
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import FinishReason
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from pdrelay_connector.shell.connector import PDRelayConnector
    from pdrelay_connector.shell.control_thread import _build_control_plane
    from pdrelay_connector.shell.engine_config import WorkerRank, read_engine_config
    from pdrelay_connector.shell.engine_waker import EngineWaker
    from pdrelay_connector.shell.metadata import RankHandshake
    from pdrelay_connector.shell.scheduler import PDRelayConnectorScheduler
    from pdrelay_connector.shell.transfer_threads import TransferThreads
    from pdrelay_connector.shell.worker import PDRelayConnectorWorker

BLOCKS = 24  # with block 0, which nothing uses
VOCABULARY = 3  # so that prompts have common beginnings
LEASE, TRANSFER, REGISTRATION, REVOKE = 30.0, 20.0, 60.0, 10.0  # s, of the connector's settings
TOKEN = b"token"  # by which a scheduler process knows its worker


@functools.cache
def kv(prefix, token):
    """What the KV cache has of a token: it depends on all before it."""
    return hashlib.blake2b(prefix + bytes([token]), digest_size=8).digest()


def kv_of(tokens):
    """What the KV cache must have of each of the tokens."""
    found = []
    last = b""
    for token in tokens:
        found.append(last := kv(last, token))
    return found


def token_of(chains):
    """What the model makes of the tokens with this KV."""
    return chains[-1][0] % VOCABULARY


def next_token(tokens):
    """What the model makes of these tokens."""
    return token_of(kv_of(tokens))


class Output(NamedTuple):
    """What a client sees of one step of its request."""

    request: str
    tokens: list
    end: FinishReason | None
    params: dict | None


class InMemoryRunner:
    """Stands for a ``Runner``: a thread of the connector, which has a turn when its process has one."""

    busy_s = 0.0  # a turn takes no time

    def __init__(self, core, link, after_turn=lambda core: None):
        self.core = core
        self._link = link
        self._after_turn = after_turn
        self.commands = deque()
        self._due = 0.0

    def post(self, command):
        self.commands.append(command)

    def check(self):
        """No thread has died: its bugs are raised in the test."""

    def start(self):
        """It has its turns when its process has one."""

    def stop(self):
        """It has no more turns."""

    def turn(self, now):
        if self.commands or self._link.inbox or (self._due is not None and now >= self._due):
            self.wake(now)

    def wake(self, now):
        while self.commands:
            self.commands.popleft()(self.core, now)
        for event in self._link.poll():
            self.core.on(event, now=now)
        self._due = self.core.advance(now=now)
        self._after_turn(self.core)


class TimedConnector(PDRelayConnector):
    """The connector of a scheduler process whose clock is the test's."""

    worlds: ClassVar = {}  # by the engine's id

    def __init__(self, vllm_config, role, kv_cache_config):
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        assert role == KVConnectorRole.SCHEDULER
        engine_config, self._settings = read_engine_config(vllm_config, kv_cache_config)
        self._engine_config = self.adjusted(engine_config)
        world = self.worlds[self._engine_config.engine]
        clock = lambda: world.now  # noqa: E731
        self._engine_config = dataclasses.replace(
            self._engine_config, address=world.addresses[self._engine_config.engine]
        )
        self._scheduler = PDRelayConnectorScheduler(
            self._engine_config, self._settings, EngineWaker(None), clock, clock
        )
        self._half = self._scheduler
        self.gauges, self.seen = {}, Counter()  # what vLLM's metrics have shown of us

    def adjusted(self, engine_config):
        """Return what the configuration would say of another model."""
        return engine_config

    def get_kv_connector_stats(self):
        """Remember what vLLM is about to export."""
        if (stats := super().get_kv_connector_stats()) is not None:
            self.gauges.update(stats.data["gauges"])
            self.seen.update(stats.data["counters"])
        return stats


@functools.cache
def _configured():
    """Return vLLM's configuration, and what all engines share; read once."""
    folder = Path(tempfile.mkdtemp())
    ensure_model(folder)
    init_none_hash(sha256)
    config = EngineArgs(
        model=str(folder),
        generation_config="vllm",  # the model has none, which each engine would look for
        max_model_len=BLOCK_SIZE * (BLOCKS - 1),
        block_size=BLOCK_SIZE,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        async_scheduling=False,
        kv_transfer_config={
            "kv_connector": TimedConnector.__name__,
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "mode": "auto",
                "kv_lease_duration": LEASE,
                "transfer_timeout": TRANSFER,
                "registration_timeout": REGISTRATION,
                "revoke_after": REVOKE,
                "idle_wait": 0.0,
            },
        },
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float16)
    cache = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l.0"], spec)])
    return config, cache, StructuredOutputManager(config), get_request_block_hasher(BLOCK_SIZE, sha256)


class WatchedReader(InMemoryTransferAgent):
    """Looks at every block that it reads into."""

    def __init__(self, network, memory, world):
        super().__init__(network, memory)
        self.memory, self.world = memory, world

    def _copy(self, flight):
        self.world.check_write(self.memory, [local for _, local in pieces_of(flight.spans)], None)
        super()._copy(flight)


class WorkerProcess:
    """One of an engine's workers: our connector in it, and its transfer thread."""

    def __init__(self, engine, link, movers, info, token, settings):
        engine_config = engine.connector._engine_config
        self.movers = movers
        self.info = info
        self.counters = engine.worker_counters
        self.writer = PushWriter(
            link,
            movers[0],
            self.counters,
            info,
            scheduler_endpoint=EngineEndpoint(EngineId(engine.agent), engine.address),
            token=token,
            timeout=TRANSFER,
        )
        self.peers = PeerTable(link, FINGERPRINT, self.counters, retry_after=settings.retry_after)
        self.reader = PullReader(link, movers[1], self.peers, self.counters, info, timeout=TRANSFER)
        self.worker = PDRelayConnectorWorker(engine_config, settings, WorkerRank(info.rank))
        self.runner = InMemoryRunner(ReturningWriter(self.writer, self.reader), link, self.worker._after_turn)
        self.worker._threads = TransferThreads(self.runner, self.runner)


class ScheduledEngine:
    """One engine process of ``kv_role`` kv_both and mode auto: it lends and takes, in pull and in push."""

    def __init__(self, world, name, address):
        self.world = world
        self.name = name
        self.address = address
        self.alive = True
        self.frozen = False
        self.generation = 0
        self.inbox = deque()  # what clients ask for, until the next step
        self.lent = {}  # lease -> its blocks and what must be in them
        TimedConnector.worlds[name] = world
        world.addresses[name] = address
        self.scheduler, self._hasher = self._make_scheduler()
        self.connector = self.connector_of(self.scheduler)
        self.prefills, self.decodes = self.connector._scheduler._prefills, self.connector._scheduler._decodes
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._start_threads(self.connector._engine_config, self.connector._settings)

    def _make_scheduler(self):
        """Return vLLM's scheduler, and what hashes its requests' blocks."""
        shared, cache, structured, hasher = _configured()
        config = copy.copy(shared)
        config.kv_transfer_config = dataclasses.replace(shared.kv_transfer_config, engine_id=self.name)
        return Scheduler(config, cache, structured, BLOCK_SIZE), hasher

    def connector_of(self, scheduler):
        """Return ours of what a scheduler has."""
        return scheduler.connector

    def _allocate(self, network, _):
        """Return the description of this engine's memory, and what moves KV in and out of it."""
        self.memory = network.memories[self.agent] = [b"zero"] * (BLOCKS * BLOCK_SIZE)
        movers = [mover(network, self.agent, self.world) for mover in (WatchedMover, WatchedReader)]
        return rank_info(self.agent, BLOCKS, width=BLOCK_BYTES), movers

    def _start_threads(self, engine_config, settings):
        network = self.world.network
        info, self.movers = self._allocate(network, engine_config)
        self.links = [InMemoryLink(network, self.agent, engine=self.name) for _ in range(2)]
        self.worker_counters = Counters()
        thread = self.connector._scheduler._control
        thread.start = lambda handshakes, *_: self._start_control(thread, engine_config, settings, handshakes)
        thread._outbox.wait = self._wait
        handshake = RankHandshake(info, info, FINGERPRINT, TOKEN, self.generation)
        self.connector._scheduler.start({0: handshake}, FINGERPRINT)
        self._start_worker(settings, info)

    def _start_control(self, thread, engine_config, settings, handshakes):
        self.counters = Counters()
        self.control = _build_control_plane(
            engine_config,
            settings,
            self.links[0],
            self.counters,
            handshakes,
            fingerprint=FINGERPRINT,
            last_turn=lambda: thread._last_turn,
        )
        self.control_runner = InMemoryRunner(self.control, self.links[0], thread._after_turn)
        thread._run(self.control_runner)
        ranks = tuple(handshakes[number].rank for number in sorted(handshakes))
        welcome = Welcome(PROTOCOL, EngineId(self.agent), FINGERPRINT, ranks)
        self.world.network.listen(self.address, self.links[0], welcome)

    def _wait(self, _):
        """The control thread has its turn meanwhile."""
        self.control_runner.wake(self.world.now)

    def _start_worker(self, settings, info):
        process = WorkerProcess(self, self.links[1], self.movers, info, TOKEN, settings)
        self.processes = [process]
        self.writer = process.writer
        self.worker_peers = process.peers
        self.reader = process.reader
        self.worker, self.worker_runner = process.worker, process.runner

    # ---- what clients do

    def ask(self, name, tokens, *, most, params=None, priority=0):
        """Send a request, which the engine sees with its next step."""
        self.inbox.append(lambda: self._add(name, tokens, most, params, priority))

    def abort(self, name):
        """Close the connection of a request."""
        self.inbox.append(lambda: self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED))

    def _add(self, name, tokens, most, params, priority):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=most, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        others = self.others_of(name)
        self.scheduler.add_request(
            Request(name, list(tokens), sampling, None, block_hasher=self._hasher, priority=priority, **others)
        )

    def others_of(self, _name):
        """Return what decides a request's KV beside its tokens, as arguments of vLLM's request."""
        return {}

    # ---- the process

    def turn(self, now):
        """One turn of both threads, and one step of the loop; returns what clients see of it."""
        if not self.alive or self.frozen:
            return []
        self.turn_of_threads(now)
        while self.inbox:
            self.inbox.popleft()()
        is_paused = self.scheduler.pause_state is not PauseState.UNPAUSED
        return self._step() if self.scheduler.has_requests() and not is_paused else []

    def turn_of_threads(self, now):
        """One turn of both threads; no client sees anything of it."""
        for runner in (self.control_runner, *(process.runner for process in self.processes)):
            runner.turn(now)
        return []

    def _step(self):
        """As ``EngineCore.step`` and the model runner's mixin for connectors do it."""
        scheduled = self.scheduler.schedule()
        metadata = scheduled.kv_connector_metadata
        for worker in self.workers:
            worker.add_computed(metadata.pieces)
        self.before_computing()
        sampled = self._compute(scheduled)
        model = self._collect([self._output_of(worker, metadata, sampled) for worker in self.workers])
        found = self.scheduler.update_from_output(scheduled, model)
        return [
            Output(each.request_id, each.new_token_ids, each.finish_reason, each.kv_transfer_params)
            for outputs in found.values()
            for each in outputs.outputs
        ]

    @property
    def workers(self):
        """Our connector in each worker."""
        return [process.worker for process in self.processes]

    @staticmethod
    def _output_of(worker, metadata, sampled):
        """As a worker's model runner ends a step."""
        worker.start_load_kv(metadata)
        ended = worker.get_transfer_results()
        output = KVConnectorOutput(
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        return ModelRunnerOutput(
            list(sampled), {name: place for place, name in enumerate(sampled)}, list(sampled.values()),
            kv_connector_output=output,
        )  # fmt: skip

    def _collect(self, outputs):
        """Return what the scheduler sees of what the workers say."""
        (output,) = outputs
        return output

    def before_computing(self):
        """What the transfer thread does while the model computes may come before all of it."""

    def _compute(self, scheduled):
        """Compute the KV of the scheduled tokens from that of those before, and sample."""
        for request in self.scheduler.requests.values():
            self._note_hashes(request)
        sampled = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            stop = self.scheduler.requests[name].num_computed_tokens
            tokens = request.all_token_ids[:stop]
            places = self.places(self.blocks_of(name))
            wanted = kv_of(tokens)
            for number in range(stop):
                if number >= stop - count:
                    self.memory[places[number]] = wanted[number]
                assert self.memory[places[number]] == wanted[number], f"{name} was computed from other KV"
            sampled[name] = [next_token(tokens)] if stop == request.num_tokens else []
        return sampled

    def _note_hashes(self, request):
        wanted = None
        for number, each in enumerate(request.block_hashes):
            key = make_block_hash_with_group_id(each, 0)
            if key not in self.world.cached:
                wanted = wanted or kv_of(request.all_token_ids)
                self.world.cached[key] = wanted[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]

    @property
    def agent(self):
        """By which other engines know this one: each generation has another name, and other memory."""
        return in_generation(self.name, self.generation)

    def sleep(self):
        """As vLLM's ``EngineCore.sleep`` and its workers do it, from the reset on."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.connector._scheduler.fall_asleep()
        for process in self.processes:
            process.runner.core.give_up("this engine goes to sleep", now=self.world.now)
        while any(process.runner.core.uses_memory for process in self.processes):
            self._wait(None)
        for link, process in zip(self.links[1:], self.processes, strict=True):
            link.close_all("")
            del self.world.network.memories[process.info.agent.decode()]

    def wake_up(self):
        """The memory is back, elsewhere, and the scheduler goes on."""
        self.generation += 1
        earlier = self.workers
        self._start_threads(self.connector._engine_config, self.connector._settings)
        for worker, before in zip(self.workers, earlier, strict=True):
            worker._outbox, worker._loading = before._outbox, before._loading
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def die(self):
        """The process ends. What its worker had on its way may still arrive."""
        self.alive = False
        self.world.strays += [self.world.stray(self.movers[0], flight) for flight in self.movers[0]._xfers.values()]
        for link in self.links:
            self.world.network.kill(link)

    # ---- what can be seen of it

    @property
    def leases(self):
        return self.control.lease_manager.leases

    @property
    def is_empty(self):
        """Whether a router would show it as empty: no request, and no lease in its metrics."""
        return not self.inbox and not self.scheduler.requests and not self.connector.gauges.get("leases_held")

    def blocks_of(self, name):
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return blocks

    @staticmethod
    def places(blocks):
        return [block * BLOCK_SIZE + token for block in blocks for token in range(BLOCK_SIZE)]

    def note_offer(self, output, tokens):
        """Remember what another engine may read, or is written, of a finished prefill."""
        params = output.params
        name = params["transfer_id"] if params["transfer_mode"] == "push" else params["remote_request_id"]
        self.lent[name] = list(params["remote_block_ids"][0]), kv_of(tokens)

    # ---- what must hold

    def check(self):
        """Each block has exactly the owners that know of it, and what they have put there."""
        leases = self.prefills._held_blocks._leases
        held = {name: [block.block_id for block in lease.blocks] for name, lease in leases.items()}
        quarantined = {
            name: [block.block_id for block in each.blocks] for name, each in self.decodes._quarantined._loads.items()
        }
        used = {name: self.blocks_of(name) for name in self.scheduler.requests}
        owners = Counter(block for each in (held, quarantined, used) for blocks in each.values() for block in blocks)
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == owners[block.block_id], f"block {block.block_id} of {self.name}: other owners"
            if block.block_hash is not None:
                found = self.memory[block.block_id * BLOCK_SIZE : (block.block_id + 1) * BLOCK_SIZE]
                assert found == self.world.cached[block.block_hash], f"block {block.block_id} is not what its hash says"
        for name, blocks in held.items():
            known = self.lent.get(name)
            if known is not None:
                assert known[0] == blocks, f"lease {name} is of other blocks than it says"
                found = [self.memory[place] for place in self.places(blocks)][: len(known[1])]
                assert found == known[1], f"lease {name} has other KV than it says"
        for name, each in self.decodes._remote_prefills.items():
            if each.into:
                most = 2 if name in quarantined else 1
                assert all(owners[block] <= most for block in each.into), f"{name} is loaded into another's blocks"
        leases = self.leases._leases.keys()
        assert leases <= held.keys(), f"leases without blocks: {leases - held.keys()}"
        if not self.control_runner.commands and not self.connector._scheduler._control.has_results:
            assert leases == held.keys(), f"blocks without a lease: {held.keys() - leases}"

    def check_is_at_rest(self, living):
        """Nothing is left: no request, block, lease or entry of any table."""
        for runner in (self.control_runner, self.worker_runner):
            runner.wake(self.world.now)  # refused engines are forgotten with the next turn, whenever that is
        assert not self.scheduler.requests
        assert self.pool.get_num_free_blocks() == BLOCKS - 1, f"{self.name} lost blocks"
        control, writer = self.control, self.writer
        assert (list(self.prefills._held_blocks._leases), list(self.leases._leases)) == ([], [])
        renewed = control.lease_renewer._leases_by_engine
        assert renewed == {}, f"{self.name} still renews {renewed}"
        assert len(self.decodes._remote_prefills) == len(self.decodes._quarantined) == 0
        assert self.decodes._shared._prompts == {}
        assert (len(control.push_receiver), len(self.reader)) == (0, 0)
        coordinator = control.push_coordinator
        assert coordinator._by_request == coordinator._remembered._early == {}
        assert all(peer.pushes == {} for peer in coordinator._peers.values())
        assert writer._sources == writer._jobs == writer._by_request == writer._by_part == {}
        assert [mover._xfers for mover in self.movers] == [{}, {}]
        assert (self.prefills._push_progress._names, len(self.prefills._push_progress)) == (set(), 0)
        for peers in (control._peers, self.worker_peers):
            assert {peer.engine for peer in peers._peers.values()} <= living, "an engine that is gone is still known"
        assert set(self.reader._remote_engines) <= living
