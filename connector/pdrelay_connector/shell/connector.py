"""The class that vLLM instantiates, once per scheduler and once per worker.

It only translates vLLM's hooks.
"""

import os
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import (
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from pdrelay_connector.core.counters import StatsReport
from pdrelay_connector.core.messages import Fingerprint
from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.settings import read_settings, remarks
from pdrelay_connector.shell.control_thread import common_fingerprint
from pdrelay_connector.shell.engine_config import EngineConfig, WorkerRank, read_engine_config
from pdrelay_connector.shell.engine_waker import find_engine_waker
from pdrelay_connector.shell.fingerprint import fingerprint, info_labels, with_model
from pdrelay_connector.shell.kernel_layout import kernel_layout_of
from pdrelay_connector.shell.metadata import RankHandshake, StepMetadata, WorkerMetadata
from pdrelay_connector.shell.network import check_side_channel
from pdrelay_connector.shell.plugin import register
from pdrelay_connector.shell.scheduler import PDRelayConnectorScheduler
from pdrelay_connector.shell.sleep_hooks import before_sleeps, find_executor
from pdrelay_connector.shell.vllm_stats import PDRelayPromMetrics, PDRelayStats
from pdrelay_connector.shell.vllm_versions import LaterHooks
from pdrelay_connector.shell.worker import PDRelayConnectorWorker

logger = init_logger("vllm.pdrelay")


class PDRelayConnector(LaterHooks, KVConnectorBase_V1, SupportsHMA):
    """Pull: the decode engine reads a finished prefill's blocks over NIXL.

    Push: the prefill engine writes them.
    """

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Request the layout LBHNC, as vLLM's NixlConnector does; MLA has no heads."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine_config, settings = read_engine_config(vllm_config, kv_cache_config)
        check_side_channel(settings)
        self._settings = settings
        self._engine_config = engine_config
        # absent until the workers have described themselves
        self._fingerprint: Fingerprint | None = None
        self._half: PDRelayConnectorScheduler | PDRelayConnectorWorker
        if role == KVConnectorRole.SCHEDULER:
            for remark in remarks(
                vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ
            ):
                logger.warning("pdrelay: %s", remark)
            self._half = self._scheduler = PDRelayConnectorScheduler(
                engine_config, settings, find_engine_waker()
            )
            if engine_config.sleeps:
                before_sleeps(
                    find_executor(), self._scheduler.fall_asleep, self._scheduler.stay_awake
                )
        else:
            self._half = self._worker = PDRelayConnectorWorker(
                engine_config, settings, _rank(engine_config)
            )

    def shutdown(self) -> None:
        """End our threads and close our sockets."""
        self._half.shutdown()

    def get_kv_connector_stats(self) -> PDRelayStats | None:
        """Return the numbers of this process since the last call."""
        return self._half.get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PDRelayStats:
        """Rebuild stats from another process's data for vLLM's log line, without timeline events.

        The log line merges all reports of its interval, and would copy all events with each step.
        """
        return PDRelayStats(msgspec.convert({**(data or {}), "events": []}, StatsReport))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: Any,
        per_engine_labelvalues: Any,
    ) -> PDRelayPromMetrics:
        """Register our Prometheus metrics."""
        # By this id peers know the engine; data-parallel ranks add "_dp" and their number
        # (``vllm/v1/engine/core.py``).
        transfer = vllm_config.kv_transfer_config
        info = info_labels(vllm_config) | {
            "engine_id": str(transfer.engine_id),
            "kv_role": str(transfer.kv_role),
        }
        settings = read_settings(transfer.kv_connector_extra_config, {}, transfer.kv_connector)
        return PDRelayPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            info,
            shows_nixl=settings.nixl_metrics,
        )

    # ---- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep the pool in which leased blocks are pinned."""
        self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Start the control thread, now that the workers have registered their memory."""
        ours = {md.rank.worker: md for md in metadata.values() if isinstance(md, RankHandshake)}
        if not ours:
            raise UnsupportedCache(
                "another connector describes this engine's memory to peers; MultiConnector passes "
                "on what its first connector with such a description says, so only one of "
                "NixlConnector, PDRelayConnector and the like can be in it"
            )
        if self._fingerprint is None:  # after a sleep the files may be those of another model
            self._fingerprint = with_model(common_fingerprint(ours), self._vllm_config)
        self._scheduler.start(ours, self._fingerprint)

    def on_new_request(self, request: Request) -> None:
        """Start to renew the request's lease."""
        self._scheduler.on_new_request(request)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether D's own cache may have KV of more tokens than it has a state after.

        A load brings the state whatever is cached. It brings nothing before the cached tokens,
        which a window may need.
        """
        return not any(group.frees_early for group in self._engine_config.groups)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens will be loaded, and whether asynchronously."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the orders for the workers."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handle the loads that the workers have finished."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lease a prefill's blocks, or end a load.

        False: vLLM may free its references to the blocks now.
        """
        return False, self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`, with the blocks of each KV cache group."""
        return False, self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Request one more step for blocks to free, or metadata for the workers."""
        return self._scheduler.has_pending_push_work()

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache with NIXL."""
        config = self._vllm_config
        self._worker.register_kv_caches(
            kv_caches,
            fingerprint(config, self._settings, self._engine_config),
            kernel_layout_of(config, self._engine_config.groups),
        )

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Keep vLLM's operation that copies blocks on this platform."""
        self._worker.set_host_xfer_buffer_ops(copy_operation)

    def get_handshake_metadata(self) -> RankHandshake | None:
        """Return the description of this rank's memory for peers."""
        return self._worker.get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Push the blocks of earlier steps, and take checksums before this step reuses blocks.

        vLLM calls this before the forward (``v1/worker/kv_connector_model_runner_mixin.py``, 0.32).
        """
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self._worker.take_sums(connector_metadata.sampled)
            self._worker.add_computed(connector_metadata.pieces)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads; vLLM 0.32 calls it after the forward for asynchronous loads."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata):
            self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only when all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: transfers read the paged cache itself."""

    def wait_for_save(self) -> None:
        """Do nothing: no layer is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that ended."""
        return self._worker.get_transfer_results()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Report quarantined blocks to the scheduler; called after get_transfer_results."""
        return self._worker.build_connector_worker_meta()


def _rank(engine_config: EngineConfig) -> WorkerRank:
    """Return which of its engine's workers this one is.

    Where a prompt is computed in several contexts, these either divide it, or all keep the same of
    it (``kv_connector/v1/nixl/base_worker.py`` in vLLM 0.32).
    """
    stage: int = get_pp_group().rank_in_group
    tensor: int = get_tensor_model_parallel_rank()
    if engine_config.contexts == 1:
        return WorkerRank(tensor, stage)
    context: int = get_pcp_group().rank_in_group
    if engine_config.shards > 1:
        return WorkerRank(context, stage)
    return WorkerRank(tensor, stage, is_copy=context > 0)


register()
