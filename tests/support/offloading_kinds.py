"""Pairs of :mod:`support.async_kinds` whose engines have vLLM's OffloadingConnector beside ours, in its MultiConnector.

Its scheduler and its manager of the tier in host memory are vLLM's. Its copies are played: as on a GPU, one waits for
the steps before it, and is done at any time after that, at the latest when the worker waits for it.
"""

import itertools
import warnings
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

from support.async_kinds import AsyncEngine, AsyncPair
from support.cache_kinds import KindsConnector

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.v1.kv_offload.base import (
        OffloadingSpec,
        OffloadingWorker,
        TransferResult,
        get_offload_block_hash,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

CHUNKS = 200  # of the tier, a block each


class Tier(OffloadingSpec):
    """A tier in host memory."""

    def get_manager(self):
        return CPUOffloadingManager(num_chunks=CHUNKS)

    def get_worker(self, kv_caches):
        raise AssertionError("the test makes it")


@dataclass
class _Copy:
    """A copy that was submitted: it waits for these steps."""

    job: int
    earlier: list
    pairs: list  # (group, block of the cache, chunk)
    is_load: bool
    is_done: bool = False


class TierWorker(OffloadingWorker):
    """Copies between an engine's cache and its tier."""

    def __init__(self, engine):
        self.engine = engine
        self.chunks = {}
        self.copies = []
        self.is_slow = False  # until it is waited for

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._submit(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._submit(job_id, dst_spec, src_spec, is_load=True)

    def _submit(self, job, blocks, chunks, *, is_load):
        groups = [group for group, count in enumerate(blocks.group_sizes) for _ in range(count)]
        pairs = list(zip(groups, blocks.block_ids.tolist(), chunks.block_ids.tolist(), strict=True))
        self.copies.append(_Copy(job, list(self.engine.in_flight), pairs, is_load))
        return True

    def turn(self, last=None):
        """Have the first copies done, up to one, or to any."""
        for copy in self.copies:
            if last is None and (self.is_slow or self.engine.world.dice.random() < 0.5):
                break
            self._do(copy)
            if copy is last:
                break

    def _do(self, copy):
        if copy.is_done:
            return
        copy.is_done = True
        if copy.earlier:
            self.engine.compute_until(copy.earlier[-1])
        if not copy.is_load:
            self._check(copy)
        for group, block, chunk in copy.pairs:
            for number, layer in self.engine.layers:
                if number == group:
                    rows = slice(block * layer.rows, (block + 1) * layer.rows)
                    if copy.is_load:
                        layer.bytes[rows] = self.chunks[layer.name, chunk]
                    else:
                        self.chunks[layer.name, chunk] = layer.bytes[rows].copy()
        self.engine.world.counts["tier loads" if copy.is_load else "tier stores"] += 1

    def _check(self, copy):
        """What is stored is what its hash says."""
        chunks = self.engine.theirs.manager._policy.chunks
        keys = {chunk.chunk_id: key for key, chunk in chunks.items() if not chunk.is_ready}
        for group, block, chunk in copy.pairs:
            assert get_offload_group_idx(keys[chunk]) == group
            chains = self.engine.world.cached[get_offload_block_hash(keys[chunk])]
            for number, layer in self.engine.layers:
                if number == group:
                    layer.check(block, chains)

    def get_finished(self):
        self.turn()
        done = list(itertools.takewhile(lambda copy: copy.is_done, self.copies))
        del self.copies[: len(done)]
        return [TransferResult(copy.job, success=True) for copy in done]

    def wait(self, job_ids):
        for copy in list(self.copies):
            if copy.job in job_ids:
                self.turn(copy)


class OffloadingEngine(AsyncEngine):
    """One engine with both connectors. ``ours_first`` is the order in which they are asked."""

    def _spoil(self, request, external):
        """Only when the tier has copied what was there before."""
        self.spoilt.append((request, external))

    def configure(self, config):
        super().configure(config)
        self.spoilt = deque()
        ours = config.kv_transfer_config
        connectors = [
            {
                "kv_connector": KindsConnector.__name__,
                "kv_connector_module_path": KindsConnector.__module__,
                "kv_role": ours.kv_role,
                "kv_load_failure_policy": ours.kv_load_failure_policy,
                "kv_connector_extra_config": ours.kv_connector_extra_config,
            },
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"spec_name": Tier.__name__, "spec_module_path": __name__},
            },
        ]
        self.ours = 0 if self.world.ours_first else 1
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=ours.kv_role,
            kv_load_failure_policy=ours.kv_load_failure_policy,
            engine_id=self.name,
            kv_connector_extra_config={"connectors": connectors if self.world.ours_first else connectors[::-1]},
        )

    def connector_of(self, scheduler):
        return scheduler.connector.sub_connectors[self.ours]

    def _start_threads(self, engine_config, settings):
        super()._start_threads(engine_config, settings)
        self.theirs = self.scheduler.connector.sub_connectors[1 - self.ours].connector_scheduler
        self.tier = OffloadingConnectorWorker(SimpleNamespace(replicated_layout=False), None, None)
        self.tier.worker = TierWorker(self)

    def begin(self, scheduled):
        """The worker gets a step when it has begun the one before. Meanwhile others have their turn."""
        both = scheduled.kv_connector_metadata.metadata
        self.frozen = True
        for _ in range(self.world.dice.choice(self.world.lags)):
            self._wait(None)
        self.frozen = False
        self.order = both[1 - self.ours]
        self.tier.handle_preemptions(self.order)
        while self.spoilt:
            super()._spoil(*self.spoilt.popleft())
        return both[self.ours]

    def _output_of(self, worker, metadata, sampled):
        model = super()._output_of(worker, metadata, sampled)
        self.tier.start_kv_transfers(self.order)
        self.tier.prepare_store_kv(self.order)
        output = model.kv_connector_output
        output.finished_recving |= self.tier.get_finished(set())[1]
        both = [output.kv_connector_worker_meta, self.tier.build_connector_worker_meta()]
        output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(tuple(both if self.ours == 0 else both[::-1]))
        return model


class OffloadingPair(AsyncPair):
    """Both engines have both connectors."""

    engine_class = OffloadingEngine

    def __init__(self, p, d, chances):
        self.ours_first = chances.seed % 2 == 0
        self.lags = (0, 0, 0, 0, 1, 5)  # rounds that others have before a worker begins a step
        super().__init__(p, d, chances)
