"""Pairs of :mod:`support.async_kinds` whose P loads KV at once from elsewhere, and some of it is bad, as with LMCache.

In vLLM's MultiConnector, a connector beside ours says how many tokens it has of a prompt. Its worker loads them before
it computes the step in which they are scheduled, and reports the blocks that it could not load (``invalid_block_ids``).
What P computes from bad KV is bad: so is what vLLM gets wrong there, which no client of a decode engine may see.
"""

import copy
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

from support.async_kinds import AsyncEngine, AsyncPair
from support.cache_kinds import KindsConnector
from support.scheduled_engine import kv_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
    from vllm.v1.core.sched.scheduler import Scheduler

BAD = b"bad"
PATIENCE = 20.0  # s that a router waits for a prefill


@dataclass
class Loads(KVConnectorMetadata):
    """What a step loads: (block, the number of its first token, what it must have; None: it is bad)."""

    blocks: list = field(default_factory=list)

    @property
    def invalid(self):
        return {block for block, _, chains in self.blocks if chains is None}


class LoaderAtOnce(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a connector that has parts of all prompts."""

    worlds: ClassVar = {}  # by the engine's id

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.world = self.worlds[vllm_config.kv_transfer_config.engine_id]
        self.size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.matched = {}  # request -> its first block that is loaded
        self.loads = Loads()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        most = max(0, request.num_prompt_tokens - 1 - num_computed_tokens) // self.size
        self.matched[request.request_id] = num_computed_tokens // self.size
        return self.world.elsewhere(request.request_id, most) * self.size, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        (table,) = blocks.get_block_ids()
        first = self.matched.pop(request.request_id, 0)
        chains = kv_of(request.all_token_ids)
        numbers = range(first, first + num_external_tokens // self.size)
        bad = self.world.bad_of(numbers)
        for number in numbers:
            if table[number]:
                is_bad = number in bad
                place = number * self.size
                had = None if is_bad else chains[place : place + self.size]
                self.loads.blocks.append((table[number], place, had))
                self.world.counts["bad blocks"] += is_bad

    def build_connector_meta(self, scheduler_output):
        loads = self.loads
        self.loads = Loads()
        return loads

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        raise AssertionError("the test plays the worker")

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class LoadingEngine(AsyncEngine):
    """One engine; that of name "p" has both connectors, and computes bad KV from bad KV."""

    def configure(self, config):
        super().configure(config)
        self.has_loader = self.name == "p"
        if not self.has_loader:
            return
        ours = config.kv_transfer_config
        connectors = [
            {
                "kv_connector": KindsConnector.__name__,
                "kv_connector_module_path": KindsConnector.__module__,
                "kv_role": ours.kv_role,
                "kv_load_failure_policy": self.world.policy,
                "kv_connector_extra_config": ours.kv_connector_extra_config,
            },
            {"kv_connector": "LoaderAtOnce", "kv_connector_module_path": __name__, "kv_role": "kv_both"},
        ]
        self.ours = 0 if self.world.ours_first else 1
        LoaderAtOnce.worlds[self.name] = self.world
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=ours.kv_role,
            kv_load_failure_policy=self.world.policy,
            engine_id=self.name,
            kv_connector_extra_config={"connectors": connectors if self.world.ours_first else connectors[::-1]},
        )

    def connector_of(self, scheduler):
        return scheduler.connector.sub_connectors[self.ours] if self.has_loader else scheduler.connector

    def begin(self, scheduled):
        if not self.has_loader:
            return super().begin(scheduled)
        both = scheduled.kv_connector_metadata.metadata
        self.loads = both[1 - self.ours]
        return both[self.ours]

    def _output_of(self, worker, metadata, sampled):
        model = super()._output_of(worker, metadata, sampled)
        if self.has_loader:
            output = model.kv_connector_output
            both = [output.kv_connector_worker_meta, None]
            output.invalid_block_ids = self.loads.invalid
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(
                tuple(both if self.ours == 0 else both[::-1])
            )
        return model

    def _zero_and_copy(self, scheduled):
        super()._zero_and_copy(scheduled)
        if self.has_loader:
            for block, first, chains in scheduled.kv_connector_metadata.metadata[1 - self.ours].blocks:
                self._load(block, first, chains)

    def _load(self, block, first, chains):
        for _, layer in self.layers:
            for number in range(layer.spec.block_size):
                layer.put(block, layer.slot(first + number)[1], BAD if chains is None else chains[number])

    def _compute_part(self, part):
        if not self.has_loader:
            return super()._compute_part(part)
        stop = part.start + part.count
        chains = kv_of(self.text(part.name, stop))
        for group, layer in self.layers:
            table = part.tables[group]
            is_bad = not self._reads_right(layer, table, part, chains)
            for token in range(part.start, stop):
                number, place = layer.slot(token)
                layer.put(table[number], place, BAD if is_bad else chains[token])
        self.world.counts["computed"] += part.count
        return [] if part.has_more else self.text(part.name, stop + 1)[stop:]

    @staticmethod
    def _reads_right(layer, table, part, chains):
        for token in range(layer.first_read(part.start, part.replay), part.start):
            number, place = layer.slot(token)
            try:
                layer.look(table[number], place, chains[token], f"token {token}")
            except AssertionError:
                return False
        return True


class PlainEngine(LoadingEngine):
    """One step at a time."""

    scheduler_class = Scheduler
    most_in_flight = 1

    def configure(self, config):
        super().configure(config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = False


class LoadingPair(AsyncPair):
    """P has both connectors. ``policy``: P's, for loads that fail."""

    engine_class = LoadingEngine
    policy = "recompute"

    def __init__(self, p, d, chances):
        self.ours_first = chances.seed % 2 == 0
        self.patience = {}  # request of P -> how long it is waited for
        super().__init__(p, d, chances)

    def elsewhere(self, _name, most):
        """Return how many blocks of a request the connector beside ours has, of so many."""
        return self.dice.randrange(most + 1) if self.dice.random() < 0.7 else 0

    def bad_of(self, numbers):
        """Return which of these blocks cannot be loaded."""
        fails = self.dice.random() < 0.5
        return {number for number in numbers if fails and self.dice.random() < 0.4}

    def ask(self, name, prompt, most, mode, priority=0):
        """Of P alone no client wants a right text: vLLM's own may be wrong there."""
        if mode == "p":
            self.patience[f"alone-{name}"] = self.now + PATIENCE
            self.p.ask(f"alone-{name}", prompt, most=most, priority=priority)
        else:
            super().ask(name, prompt, most, mode, priority)

    def prefill(self, name, prompt, mode, priority=0):
        self.patience[f"p-{name}"] = self.now + PATIENCE
        super().prefill(name, prompt, mode, priority)

    def round(self, *, but=None):
        """Routers give prefills up, and some of P's reads of what D has fail, too.

        A request whose load fails may stand still in vLLM, which has two steps in flight.
        """
        super().round(but=but)
        for name in [name for name, until in self.patience.items() if self.now > until]:
            del self.patience[name]
            if name in self.p.scheduler.requests:
                self.counts["given up"] += 1
                self.p.abort(name)
                if name in self.awaited:
                    self.awaited.pop(name)(None)
        reader = self.p.movers[1]
        for flight in list(reader._xfers):
            reader.cancel(flight)
            self.counts["failed reads"] += 1
        reader.stuck = self.dice.random() < 0.2
