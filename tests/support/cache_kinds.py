"""Pairs of engines with caches of any kind that vLLM has: its scheduler and managers, our whole connector, real bytes.

As in :mod:`support.scheduled_engine`, whose loop and threads these engines have. Here each layer has a tensor as vLLM
makes it (``create_kv_cache_views``), and a transfer copies between addresses. The model is played by the rules of its
layers' kinds: what a kernel reads for the next token is compared with what it must be, byte for byte.
"""

import copy
import ctypes
import dataclasses
import functools
import hashlib
import itertools
import random
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address
from pdrelay_connector.core.messages import RankInfo
from support.engines import FINGERPRINT, Turns
from support.in_memory import InMemoryLink, InMemoryNetwork, InMemoryTransferAgent
from support.in_tree_plan import InTreePlan
from support.scheduled_engine import (
    LEASE,
    TRANSFER,
    ScheduledEngine,
    TimedConnector,
    WorkerProcess,
    _configured,
    kv_of,
    next_token,
    token_of,
)
from support.story_seeds import SEEDS
from support.token_slots import slot_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import (
        get_block_hash,
        get_group_id,
        get_request_block_hasher,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        SlidingWindowSpec,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches
    from pdrelay_connector.shell.engine_config import WorkerRank
    from pdrelay_connector.shell.metadata import RankHandshake
    from pdrelay_connector.shell.worker import PDRelayConnectorWorker

CONTEXT = 96  # tokens
UNTOUCHED = 0xA5  # what a cache has where nothing was written
NAN = 0xFF  # what another group's KV may look like in this one: in every float type it is no number


@functools.cache
def content(layer, head, chain, size):
    """What a layer has of a token and a head: ``chain`` stands for all tokens up to it."""
    digest = hashlib.blake2b(f"{layer}/{head}".encode() + chain, digest_size=32).digest()
    return (digest * -(-size // len(digest)))[:size]


class Layer:
    """One layer's cache on one rank: entries by (block of vLLM's, number within the block)."""

    def __init__(self, name, spec, view, blocks, shape, rank):
        self.name = name
        self.spec = spec
        self.shape = shape
        self.rank = rank
        self.first_head = rank * shape.heads // shape.ranks
        self.bytes = view.view(torch.uint8).numpy()  # of rows, heads, entries
        self.rows = view.shape[0] // blocks  # of one block
        self.per_row = view.shape[2]

    def copy(self, source, target):
        """As vLLM does where a hit ends within a block."""
        rows = self.bytes.reshape(-1, self.rows, *self.bytes.shape[1:])
        rows[target] = rows[source]

    def put(self, block, entry, chain):
        assert block, f"{self.name} writes into the null block"
        row, number = block * self.rows + entry // self.per_row, entry % self.per_row
        for head in range(self.bytes.shape[1]):
            wanted = content(self.name, self.first_head + head, chain, self.bytes.shape[3])
            self.bytes[row, head, number] = np.frombuffer(wanted, dtype=np.uint8)

    def look(self, block, entry, chain, what):
        assert block, f"{self.name} reads {what} in the null block"
        row, number = block * self.rows + entry // self.per_row, entry % self.per_row
        for head in range(self.bytes.shape[1]):
            found = self.bytes[row, head, number].tobytes()
            wanted = content(self.name, self.first_head + head, chain, len(found))
            assert found == wanted, f"{self.name} on rank {self.rank} reads other bytes of {what}"


class Tokens(Layer):
    """Keeps an entry for each token, or for each group of them; the last group may be open."""

    def __init__(self, *args):
        super().__init__(*args)
        self._whole = {}  # block by its chains

    @property
    def ratio(self):
        return int(self.spec.tokens_per_state)

    def first_read(self, start, replay):
        spec = self.spec
        if isinstance(spec, SlidingWindowSpec):
            return max(0, start - spec.sliding_window + 1, replay if getattr(spec, "prefix_replay_tokens", 0) else 0)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return start // spec.attention_chunk_size * spec.attention_chunk_size
        return 0

    def slot(self, token):
        """Return (number of the block, place in it) of a token; None: another rank has it."""
        shards = self.shape.shards_of(self.spec)
        return slot_of(token, self.spec.block_size, shards, self.rank % shards, self.shape.interleave)

    def compute(self, table, start, stop, chains, replay):
        ratio = self.ratio
        first = self.first_read(start, replay)
        for group in range(first // ratio, start // ratio):
            token = (group + 1) * ratio - 1
            if (slot := self.slot(token)) is not None:
                self.look(table[slot[0]], slot[1] // ratio, chains[token], f"token {token} of {start}")
        for token in range(start, stop):
            if token % ratio == ratio - 1 and (slot := self.slot(token)) is not None:
                self.put(table[slot[0]], slot[1] // ratio, chains[token])
        self.look_around(table, first, stop)

    def check(self, block, chains):
        """A whole block has what it must of its tokens."""
        found = self.bytes[block * self.rows : (block + 1) * self.rows].tobytes()
        if found == self._whole.get(chains):
            return
        for token in range(self.ratio - 1, len(chains), self.ratio):
            if (slot := self.slot(token)) is not None:
                self.look(block, slot[1] // self.ratio, chains[token], f"cached token {token} of block {block}")
        self._whole[chains] = found

    def look_around(self, table, first, stop):
        """A kernel multiplies what is beside the tokens of its own blocks by 0, which NaN survives."""
        page = self.per_row * self.ratio
        slots = filter(None, map(self.slot, range(first, stop)))
        for row in {table[number] * self.rows + place // page for number, place in slots}:
            is_nan = (self.bytes[row] == NAN).all(axis=-1)
            assert not is_nan.any(), f"{self.name} has NaN beside tokens {first} to {stop} in row {row}"


class OfOneRank(Layer):
    """Keeps what no other rank has."""

    def __init__(self, name, spec, view, blocks, shape, rank):
        super().__init__(f"{name} of {rank}", spec, view, blocks, shape, rank)


class Ring(OfOneRank):
    """Keeps the tokens of the open group of half as many as there is room for, and others, overwritten in turn."""

    @property
    def ratio(self):
        return self.spec.block_size // 2

    def compute(self, table, start, stop, chains, _):
        capacity = self.spec.block_size
        (block,) = table
        for token in range(start // self.ratio * self.ratio, start):
            self.look(block, token % capacity, chains[token], f"token {token} of {start}")
        for token in range(max(start, stop - capacity), stop):
            self.put(block, token % capacity, chains[token])


class State(OfOneRank):
    """Keeps what all tokens so far have made of it, in the block of the last one."""

    def compute(self, table, start, stop, chains, _):
        size = self.spec.block_size
        if start:
            self.look(table[(start - 1) // size], 0, chains[start - 1], f"the state after {start}")
        self.put(table[(stop - 1) // size], 0, chains[stop - 1])

    def check(self, block, chains):
        """A cached state is that at the end of its block."""
        self.look(block, 0, chains[-1], f"the cached state in block {block}")


def layer_of(name, spec, *place):
    """Return the player of a layer."""
    if isinstance(spec, MambaSpec):
        return State(name, spec, *place)
    return (Ring if isinstance(spec, CircularBufferSpec) else Tokens)(name, spec, *place)


@dataclass(frozen=True)
class Shape:
    """How one engine keeps what the model needs."""

    specs: tuple  # one for each KV cache group
    layout: str = "LBHNC"
    kernel: int = 0  # tokens of one of the attention kernel's blocks; 0: as many as of vLLM's
    blocks: int = 56
    depth: int = 2  # layers of each group
    caches: bool = True  # prefixes
    lookahead: int = 0  # tokens that drafts read beyond those computed
    unit: int | None = None  # tokens of a hit of the prefix cache, if it may end within a block
    ranks: int = 1  # of tensor parallelism; ``specs`` are of one of them
    shards: int = 1  # of decode context parallelism
    interleave: int = 1  # tokens
    contexts: int = 1  # of prefill context parallelism: its ranks, or as many copies of each rank
    heads: int = 1  # of a layer, over all ranks, where there are more ranks than one

    def shards_of(self, spec):
        """Return how many ranks divide the tokens of a cache among them."""
        return self.shards if getattr(spec, "dcp_sharded", False) else 1

    def block_size(self, spec):
        """Return how many tokens a block of a request's table is for."""
        return spec.block_size * self.shards_of(spec)


def views_of(spec, names, blocks, layout, kernel):
    """Return the tensor of each layer of one group, made as vLLM makes it."""
    layout = KVCacheLayout[layout]
    kernel = None if isinstance(spec, MambaSpec | CircularBufferSpec) else kernel or None
    strides = compute_layout_strides(spec, blocks, len(names), layout)
    place = KVCacheTensor(0, list(names), strides[0], strides[1])
    raw = torch.full((strides[0] * len(names) + strides[1] * blocks,), UNTOUCHED, dtype=torch.uint8).view(torch.int8)
    views = create_kv_cache_views(raw, spec, blocks, layout, place, kernel)
    return dict(zip(names, views, strict=True))


class Copier(InMemoryTransferAgent):
    """Copies between addresses, as NIXL does."""

    def __init__(self, network, memory, world, info):
        super().__init__(network, memory)
        self.world, self.info = world, info

    def _copy(self, flight):
        self.world.copied(self.info, flight)
        for remote, local, size in flight.spans.tolist():
            target, source = (remote, local) if flight.writes else (local, remote)
            ctypes.memmove(target, source, size)


class KindsConnector(TimedConnector):
    """Remembers what vLLM's own connector is told, too."""

    shapes: ClassVar = {}  # by the engine's id

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine = None

    def adjusted(self, engine_config):
        """Drafts look as far ahead as the engine's shape says."""
        return dataclasses.replace(engine_config, lookahead=self.shapes[engine_config.engine].lookahead)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.engine.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        for order in metadata.orders:
            self.engine.moved(order.token_ranges)
        return metadata

    def update_connector_output(self, connector_output):
        ended = self._scheduler._decodes.loading & set(connector_output.finished_recving or ())
        self.engine.loaded |= ended - set(connector_output.failed_recving or ())
        super().update_connector_output(connector_output)

    def request_finished_all_groups(self, request, block_ids):
        self.engine.finished(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)


class KindsEngine(ScheduledEngine):
    """One engine whose layers are of any kinds."""

    scheduler_class = Scheduler

    def __init__(self, world, name, address, shape):
        self.shape = shape
        self.finished_tables, self.loaded = {}, set()
        self.pairs = set()  # (group, P's block, D's block) of what has moved since they were last looked at
        super().__init__(world, name, address)

    def _start_threads(self, engine_config, settings):
        """As its base, with a worker for each rank."""
        network, self.movers, self.worker_counters = self.world.network, [], Counters()
        self.links = [InMemoryLink(network, self.agent, engine=self.name)]
        self.processes = []
        handshakes = {}
        described = self.make_layers(engine_config)
        for rank, caches in enumerate(self.caches):
            memory = f"{self.agent}/{rank}"
            network.memories[memory] = []
            network.aliases[memory] = self.agent
            infos = self.describe(rank, caches, memory, described)
            handshakes[rank] = RankHandshake(*infos, FINGERPRINT, b"token %d" % rank, self.generation)
        shape = self.shape
        place = itertools.product(range(self.shape.contexts - 1), range(self.shape.ranks))
        self.copies = [
            PDRelayConnectorWorker(described, settings, WorkerRank(rank, is_copy=True))
            for _, rank in (place if shape.shards == 1 else ())
        ]
        for copy_ in self.copies:
            copy_.register_kv_caches({}, FINGERPRINT, KernelLayout.ENTRIES)
            assert copy_.get_handshake_metadata() is None
        thread = self.connector._scheduler._control
        thread.start = lambda handshakes, *_: self._start_control(thread, engine_config, settings, handshakes)
        thread._outbox.wait = self._wait
        self.connector._scheduler.start(handshakes, FINGERPRINT)
        for handshake in handshakes.values():
            self.processes.append(self.start_process(handshake, settings))
        self.aggregator = KVOutputAggregator(len(self.workers))

    def describe(self, rank, caches, memory, described):
        """Return what peers are told of a rank's memory: where it lends, and where it is written to."""
        regions = describe_caches(caches, described, self.shape.blocks, KernelLayout.ENTRIES)
        info = RankInfo(rank, self.shape.ranks, memory.encode(), "DRAM", 0, regions)
        return info, info

    def start_process(self, handshake, settings):
        """Start what serves a rank."""
        agents = [self.make_agent(handshake.rank) for _ in range(2)]
        process = WorkerProcess(self, self.make_link(handshake), agents, handshake.rank, handshake.token, settings)
        self._watch(process.writer._part_writer)
        return process

    def make_link(self, handshake):
        """Return a link of the process that serves a rank."""
        self.links.append(link := InMemoryLink(self.world.network, handshake.rank.agent.decode(), engine=self.name))
        return link

    def make_agent(self, info):
        """Return what moves KV in and out of a rank's memory."""
        self.movers.append(mover := Copier(self.world.network, info.agent.decode(), self.world, info))
        return mover

    @property
    def workers(self):
        """Beside those that serve a rank, those that keep the same of it."""
        return [*super().workers, *self.copies]

    def _watch(self, part_writer):
        write = part_writer.write

        def watched(ranks, token_ranges, **options):
            self.moved(token_ranges, is_ours=False)
            return write(ranks, token_ranges, **options)

        part_writer.write = watched

    def _collect(self, outputs):
        return self.aggregator.aggregate(outputs)

    def _make_scheduler(self):
        shared, _, structured, _ = _configured()
        shape = self.shape
        config = copy.copy(shared)
        config.kv_transfer_config = dataclasses.replace(
            shared.kv_transfer_config, engine_id=self.name, kv_connector=KindsConnector.__name__,
            kv_connector_module_path=__name__,
        )  # fmt: skip
        config.parallel_config = copy.copy(shared.parallel_config)
        config.parallel_config.tensor_parallel_size = 1 if min(shape.contexts, shape.shards) > 1 else shape.ranks
        config.parallel_config.prefill_context_parallel_size = shape.contexts
        config.parallel_config.decode_context_parallel_size = shape.shards
        if shape.contexts > 1:
            config.kv_transfer_config.kv_role = "kv_producer"
        config.parallel_config.cp_kv_cache_interleave_size = shape.interleave
        has_state = any(isinstance(spec, MambaSpec) for spec in shape.specs)
        caching = config.cache_config = copy.copy(shared.cache_config)
        caching.block_size = shape.specs[0].block_size
        caching.prefix_match_unit = shape.unit
        caching.enable_prefix_caching = shape.caches
        caching.num_gpu_blocks = shape.blocks
        caching.mamba_cache_mode = "align" if has_state and shape.caches else "none"
        config.model_config = copy.copy(shared.model_config)
        config.model_config.max_model_len = CONTEXT
        names = [[f"l.{layer}.{group}" for layer in range(shape.depth)] for group in range(len(shape.specs))]
        groups = [KVCacheGroupSpec(each, spec) for each, spec in zip(names, shape.specs, strict=True)]
        self.cache = KVCacheConfig(shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.configure(config)
        size, hashed = resolve_kv_cache_block_sizes(self.cache, config)
        self.in_tree = InTreePlan(config, self.cache, shape.lookahead)
        KindsConnector.shapes[self.name] = shape
        self.hashed = hashed
        return self.scheduler_class(config, self.cache, structured, size, hashed), self._hash

    def configure(self, config):
        """Change vLLM's configuration, which is this engine's own."""

    def _hash(self, request):
        """Hash a request's new blocks, and remember what each must have in any cache."""
        size = self.hashed
        first = len(request.block_hashes)
        found = get_request_block_hasher(size, sha256)(request)
        if found:
            chains = self.chains_of(request, (first + len(found)) * size)
            for number, each in enumerate(found, first):
                self.world.cached[bytes(each)] = tuple(chains[number * size : (number + 1) * size])
        return found

    def _step(self):
        outputs = super()._step()
        self.check_prefix_cache()
        return outputs

    def check_prefix_cache(self):
        """Each block in it is what its hash says, whoever has written it, whether anybody uses it."""
        for block in self.pool.blocks:
            if block.block_hash is None:
                continue
            number = get_group_id(block.block_hash)
            spec = self.cache.kv_cache_groups[number].kv_cache_spec
            if self.shape.block_size(spec) == self.hashed:  # else vLLM joins hashes for it
                chains = self.world.cached[bytes(get_block_hash(block.block_hash))]
                for group, layer in self.layers:
                    if group == number:
                        layer.check(block.block_id, chains)

    def make_layers(self, engine_config):
        """Make the tensors of all layers on all ranks; returns the configuration, which depends on them."""
        shape = self.shape
        self.layers = []
        self.caches = []
        for rank in range(shape.ranks):
            caches = {}
            for number, group in enumerate(self.cache.kv_cache_groups):
                spec = group.kv_cache_spec
                views = views_of(spec, group.layer_names, shape.blocks, shape.layout, shape.kernel)
                caches |= views
                self.layers += [
                    (number, layer_of(name, spec, view, shape.blocks, shape, rank)) for name, view in views.items()
                ]
            self.caches.append(caches)  # their memory is read and written by address
        self.connector.engine = self
        heads = max((getattr(spec, "num_kv_heads", 1) for spec in shape.specs), default=1)
        return dataclasses.replace(engine_config, all_heads=heads if shape.ranks == 1 else shape.heads)

    def _wait(self, _):
        """Time passes for all, but for this engine's loop."""
        self.world.now += 0.1
        self.world.round(but=self)

    def before_computing(self):
        if self.world.writes_at_once:
            for process in self.processes:
                process.runner.turn(self.world.now)

    def _zero_and_copy(self, scheduled):
        """Do what the device does to blocks before a step is computed."""
        for block in scheduled.new_block_ids_to_zero or ():
            self._fill(block, 0)
        for source, target in scheduled.kv_cache_block_copies or ():
            for _, layer in self.layers:
                layer.copy(source, target)

    def _compute(self, scheduled):
        self._zero_and_copy(scheduled)
        sampled = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            stop = request.num_computed_tokens
            chains = self.chains_of(request, stop)
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            replay = getattr(request, "replay_start", 0)
            for group, layer in self.layers:
                layer.compute(tables[group], stop - count, stop, chains, replay)
            sampled[name] = [token_of(chains)] if stop == request.num_tokens else []
            self.world.counts["computed"] += count
        return sampled

    def chains_of(self, request, stop):
        """Return what all tokens up to each one make of it."""
        return kv_of(request.all_token_ids[:stop])

    def _fill(self, block, byte):
        """Write into a block of all layers with attention, as vLLM does, which shares blocks among groups."""
        for _, layer in self.layers:
            if isinstance(layer, Tokens):
                layer.bytes[block * layer.rows : (block + 1) * layer.rows] = byte

    def _spoil(self, request, external):
        """VLLM zeroes new blocks that other groups have used, but for those that a load fills."""
        for group, ids in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
            size = self.shape.block_size(self.cache.kv_cache_groups[group].kv_cache_spec)
            for block in ids[(request.num_prompt_tokens - 1 - external) // size :]:
                if block and self.cache.needs_kv_cache_zeroing:
                    self._fill(block, NAN)

    def allocated(self, request, blocks, external):
        """VLLM has allocated the blocks of a load."""
        if external:
            self._spoil(request, external)
        self.world.counts["loads"] += external > 0
        self.world.counts["hits"] += bool(external and request.num_prompt_tokens - 1 > external)
        if external and self.world.compares:
            tables = [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(request.request_id)]
            groups = self.connector._engine_config.groups
            taken = self.in_tree.taken(blocks, tables, groups, request.num_prompt_tokens)
            self.world.loading(request, tables, taken)

    def moved(self, token_ranges, *, is_ours=True):
        """Remember what moves, by blocks."""
        for each in token_ranges:
            self.pairs |= {
                (each.group, *((theirs, ours) if is_ours else (ours, theirs)))
                for theirs, ours in zip(each.remote, each.local, strict=False)
            }

    def finished(self, request, block_ids):
        """A request ends with these blocks."""
        self.finished_tables[request.request_id] = [list(ids) for ids in block_ids]
        self.world.counts["preempted"] += request.num_preemptions


class Pair(Turns):
    """A prefill engine and a decode engine, and clients that want texts of both."""

    engine_class = KindsEngine
    prefill_params: ClassVar = {}  # beside the usual ones
    compares = InTreePlan.is_known  # what moves with what vLLM's own connector would move

    def __init__(self, p, d, *, writes_at_once=False, looks_at_blocks=False):
        """``writes_at_once``: the transfer threads are quicker than the models, else slower."""
        self.looks_at_blocks, self.moves = looks_at_blocks, set()
        self.network = InMemoryNetwork()
        self.now = 0.0
        self.writes_at_once = writes_at_once
        self.addresses, self.cached, self.strays, self.counts = {}, {}, [], Counter()
        self.p = self.engine_class(self, "p", Address("10.0.0.1", 5600), p)
        self.d = self.engine_class(self, "d", Address("10.0.0.1", 5700), d)
        self.asked = {}  # name -> (prompt, tokens so far, how many are wanted)
        self.loads = []  # of D: (name, tokens of the prompt, D's tables, blocks that vLLM's own connector would fill)
        self.awaited = {}  # name of a prefill -> what D is asked when it has ended

    def ask(self, name, prompt, most, mode, priority=0):
        """Send a prompt to both engines, or to one."""
        self.asked[name] = prompt, [], most
        if mode in ("d", "p"):
            (self.d if mode == "d" else self.p).ask(name, prompt, most=most, priority=priority)
            return
        self.prefill(name, prompt, mode, priority)
        if mode == "push":
            self.register(name, prompt, most, priority)
        else:
            self.awaited[f"p-{name}"] = lambda params: self.d.ask(
                name, prompt, most=most, params=params, priority=priority
            )

    def prefill(self, name, prompt, mode, priority=0):
        """Send the prefill leg."""
        params = {"do_remote_decode": True, "transfer_id": name, "transfer_mode": mode} | self.prefill_params
        self.p.ask(f"p-{name}", prompt, most=1, params=params, priority=priority)

    def register(self, name, prompt, most, priority=0):
        """Send the decode leg of a push, which may come before the other one."""
        self.asked[name] = prompt, [], most
        where = {
            "remote_engine_id": self.p.agent,
            "remote_host": self.p.address.host,
            "remote_port": self.p.address.port,
        }
        where |= {"do_remote_prefill": True, "transfer_id": name, "transfer_mode": "push"}
        self.d.ask(name, prompt, most=most, params=where, priority=priority)

    def round(self, *, but=None):
        """Everybody has a turn; of one that waits for its own threads, only these."""
        self.network.deliver()
        for engine in (self.p, self.d):
            for output in engine.turn(self.now) if engine is not but else engine.turn_of_threads(self.now):
                self._heard(output)

    def _heard(self, output):
        if output.request in self.awaited:
            self.counts["not handed over"] += output.params is None
            self.awaited.pop(output.request)(output.params)
        elif output.request in self.asked:
            prompt, said, _ = self.asked[output.request]
            for token in output.tokens:
                assert token == self.next_token(output.request, [*prompt, *said]), f"{output.request} has another text"
                said.append(token)

    def next_token(self, _name, tokens):
        """What the model makes of a request's tokens."""
        return next_token(tokens)

    def fail(self, dice):
        """Have something go wrong, for as long as it may take, or be right again."""
        engine = dice.choice((self.p, self.d))
        fault = dice.randrange(12)
        if fault > 6:
            return
        self.counts["faults"] += 1
        match fault:
            case 0:
                self.network.lose()
            case 1:
                self._cut(engine, is_cut=True)
                self.run(dice.choice((1.0, LEASE + 10)))
                self.network.time_out()
            case 2:
                engine.frozen = True
                self.run(dice.choice((1.0, LEASE + 10)))
            case 3:
                for mover in engine.movers:
                    mover.stuck = mover.clinging = True
                self.run(dice.choice((1.0, TRANSFER + 5)))
            case 4:
                living = [name for name, (_, said, most) in self.asked.items() if len(said) < most]
                if living:
                    self.leave(dice.choice(living))
            case _:
                self.heal()

    def leave(self, name):
        """The client of a request hangs up."""
        del self.asked[name]
        self.awaited.pop(f"p-{name}", None)
        for engine, leg in ((self.p, f"p-{name}"), (self.p, name), (self.d, name)):
            if leg in engine.scheduler.requests:
                engine.abort(leg)

    def _cut(self, engine, *, is_cut):
        for link in engine.links:
            self.network.cut(link, is_cut=is_cut)

    def heal(self):
        """End whatever is wrong."""
        for engine in (self.p, self.d):
            self._cut(engine, is_cut=False)
            engine.frozen = False
            for mover in engine.movers:
                mover.stuck = mover.clinging = False

    def copied(self, info, flight):
        """Remember the blocks that a rank has read or written: (P's rank, D's, layer, P's block, D's).

        Where each layer's blocks lie side by side.
        """
        if not self.looks_at_blocks:
            return
        known = {each.info.agent.decode(): each.info for engine in (self.p, self.d) for each in engine.processes}
        other = known[flight.memory]
        for remote, local, size in flight.spans.tolist():
            for offset in range(0, size, info.regions[0].width):
                sides = _place(other, remote + offset), _place(info, local + offset)
                (layer, theirs), (_, ours) = sides
                here, there = (other.rank, theirs), (info.rank, ours)
                p, d = (there, here) if flight.writes else (here, there)
                self.moves.add((p[0], d[0], layer, p[1], d[1]))

    def loading(self, request, tables, taken):
        """D begins a load into these tables."""
        self.loads.append((request.request_id, request.num_prompt_tokens, tables, taken))

    def compare_with_in_tree(self):
        """Compare what has moved with what vLLM's own connector would have moved, block by block.

        Whatever it would put where D reads, we have put there, and from the same block; but where it takes a block of
        other tokens, as where a window begins with the last token of a block.
        """
        for name, prompt, tables, taken in self.loads:
            if f"p-{name}" not in self.p.finished_tables or name not in self.d.loaded:
                continue  # D has computed it itself
            source = self.p.finished_tables[f"p-{name}"]
            groups = self.d.connector._engine_config.groups
            lent = self.p.in_tree.lent(source, groups, prompt)
            computed = self.d.connector._engine_config.loaded_tokens(prompt)
            for group, remote, local in self.d.in_tree.pairs(taken, lent):
                number = tables[group].index(local)
                if number not in range(
                    *groups[group].blocks_of(groups[group].first_needed(computed), computed).indices(99)
                ):
                    continue  # nothing reads it before it is computed here
                self.counts["in-tree pairs"] += 1
                if remote not in source[group] or source[group].index(remote) != number:
                    self.counts["in-tree takes other tokens"] += 1
                    continue
                known = self.p.pairs | self.d.pairs
                assert (group, remote, local) in known, f"{name}: block {number} of group {group} did not move"

    def compare_ranks_with_in_tree(self):
        """The same where ranks divide contexts: from which of P's ranks a rank of D's has which block."""
        shapes = self.p.shape, self.d.shape
        groups, theirs = (engine.connector._engine_config.groups for engine in (self.d, self.p))
        layers = {(group, layer.name.partition(" ")[0]) for group, layer in self.d.layers}
        for name, prompt, tables, taken in self.loads:
            if f"p-{name}" not in self.p.finished_tables or name not in self.d.loaded:
                continue
            lent = self.p.in_tree.lent(self.p.finished_tables[f"p-{name}"], theirs, prompt)
            computed = self.d.connector._engine_config.loaded_tokens(prompt)
            for rank in range(self.d.shape.ranks):
                pairs = self.d.in_tree.pairs_of_rank(taken, lent, tables, shapes, rank)
                for source, group, remote, local in pairs:
                    number = tables[group].index(local)
                    spec = self.d.shape.specs[group]
                    shards = self.d.shape.shards_of(spec)
                    if not isinstance(spec, MambaSpec) and not any(
                        slot is not None and slot[0] == number
                        for token in range(groups[group].first_needed(computed), computed)
                        for slot in [slot_of(token, spec.block_size, shards, rank % shards, self.d.shape.interleave)]
                    ):
                        continue  # this rank has no token there before it is computed here
                    for layer in (layer for of, layer in layers if of == group):
                        assert (source, rank, layer, remote, local) in self.moves, (
                            f"{name}: block {number} of group {group} did not move from {source} to {rank}"
                        )
                    self.counts["in-tree pairs"] += 1

    @property
    def is_done(self):
        return all(len(said) == most for _, said, most in self.asked.values())


def _place(info, address):
    """Return (layer, block of vLLM's) of an address."""
    for region in info.regions:
        if 0 <= address - region.base < region.count * region.row_stride:
            return region.layer, (address - region.base) // region.row_stride // region.rows
    raise AssertionError(f"{address} is in no cache of rank {info.rank}")


MODES = ("pull", "push", "pull", "push", "d", "p")


def play(p, d, seed, *, requests=10, modes=MODES, is_equal=True, has_faults=False, compares_ranks=False):
    """Send prompts with common beginnings to a pair, some of them at once; returns what has happened.

    vLLM's own connector is asked, too, where both engines ``is_equal``, or where each rank is to be compared.
    """
    pair = Pair(p, d, writes_at_once=seed % 2 == 1, looks_at_blocks=compares_ranks)
    dice = random.Random(seed)
    trunk = [dice.randrange(3) for _ in range(CONTEXT)]
    forks = [dice.randrange(70) for _ in range(3)]
    for number in range(requests):
        shared = dice.choice(forks)
        prompt = trunk[:shared] + [dice.randrange(3) for _ in range(dice.randrange(1, 20))]
        most = min(dice.randrange(1, 12), CONTEXT - len(prompt))
        pair.ask(f"r{number}", prompt, most, dice.choice(modes))
        for _ in range(dice.choice((0, 0, 0, 1, 6))):
            pair.round()
            if has_faults:
                pair.fail(dice)
    pair.heal()
    for _ in range(240 if has_faults else 60):
        if pair.is_done:
            break
        pair.run(1.0)
    assert pair.is_done, "some texts are missing"
    pair.counts["loaded"] = len(pair.d.loaded)
    if is_equal:
        pair.compare_with_in_tree()
    if compares_ranks:
        pair.compare_ranks_with_in_tree()
    pair.run(240.0 if has_faults else 40.0)
    for engine in (pair.p, pair.d):
        assert engine.pool.get_num_free_blocks() == engine.shape.blocks - 1, f"{engine.name} lost blocks"
    return pair


def stories(p, d, seeds=SEEDS, **options):
    """Play some stories; returns what has happened in all of them."""
    return sum((play(p, d, seed, **options).counts for seed in range(seeds)), Counter())


def push_at_once(shape):
    """Push prompts with a common beginning that P begins in one step: D has lent its blocks before."""
    pair = Pair(shape, shape, writes_at_once=True)
    prompts = {f"r{number}": [1] * 40 + [number] * 5 for number in range(3)}
    for name, prompt in prompts.items():
        pair.register(name, prompt, 4)
    for _ in range(6):
        pair.round()
    for name, prompt in prompts.items():
        pair.prefill(name, prompt, "push")
    for _ in range(60):
        pair.round()
    assert pair.is_done, "some texts are missing"
    return pair
