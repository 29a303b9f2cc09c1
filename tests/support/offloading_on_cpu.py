"""VLLM's tiers of offloaded KV on an engine without a GPU.

vLLM 0.32 has no copy from a KV cache in host memory to its CPU tier: ``CPUOffloadingSpec.get_worker`` refuses, and
``CPUOffloadingWorker`` copies on streams of a GPU. Everything else of ``OffloadingConnector`` is for any platform: its
scheduler, the tiers' managers, the shared region and the files. So this module adds that copy, by vLLM's own
``spec_module_path``.
"""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostOffloadingSpec(TieringOffloadingSpec):
    """The CPU tier, and those behind it that are configured, of a KV cache in host memory.

    The file of the shared region has no name once both sides have it open: with ``TieringOffloadingSpec`` it stays in
    /dev/shm if the engine is killed.
    """

    def get_manager(self):
        manager = super().get_manager()  # in the scheduler, which opens the region after the worker
        Path(self._scheduler_mmap.mmap_path).unlink(missing_ok=True)
        return manager

    def get_worker(self, kv_caches):
        if self._worker is None:
            assert self.blocks_per_chunk == 1, "a chunk of several blocks is not copied here"
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            region._creator = False  # get_manager() removes the file
            self._worker = HostOffloadingWorker(kv_caches, region)
        return self._worker


class HostOffloadingWorker(OffloadingWorker):
    """Copies when it is told to: of a transfer nothing is under way after the call that starts it."""

    def __init__(self, kv_caches, region):
        self._region = region
        self._cache = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes).numpy() for each in kv_caches.tensors
        ]
        self._tier = [region.create_next_worker_view(each.page_size_bytes).numpy() for each in kv_caches.tensors]
        self._groups = kv_caches.group_data_refs
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, self._cache, src_spec.block_ids, self._tier, dst_spec.block_ids)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, self._tier, src_spec.block_ids, self._cache, dst_spec.block_ids)

    def _copy(self, job_id, blocks, source, read, target, written):
        began = time.perf_counter()
        copied = 0
        ends = np.cumsum([0, *blocks.group_sizes])
        for layers, (begin, end) in zip(self._groups, pairwise(ends), strict=True):
            for layer in layers:
                tensor, size = layer.tensor_idx, layer.page_size_bytes
                target[tensor][written[begin:end], :size] = source[tensor][read[begin:end], :size]
                copied += int(end - begin) * size
        self._finished.append(TransferResult(job_id, True, copied, time.perf_counter() - began))
        return True

    def get_finished(self):
        finished = self._finished
        self._finished = []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._cache, self._tier = [], []
        self._region.cleanup()
