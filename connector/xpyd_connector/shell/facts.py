"""What we need to know of an engine, read out of vLLM's configuration once."""

import os
from dataclasses import dataclass
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.kv_cache_interface import KVCacheConfig

from xpyd_connector.core.ids import Address, EngineId
from xpyd_connector.core.messages import Fingerprint
from xpyd_connector.errors import UnsupportedCache
from xpyd_connector.settings import Settings, read_settings


@dataclass(frozen=True, slots=True)
class Facts:
    """One engine, as far as moving its KV is concerned."""

    engine: EngineId
    address: Address  # of its side channel, this data-parallel rank's
    block_size: int  # tokens
    blocks: int
    ranks: int  # tensor-parallel size
    lends: bool  # kv_role lets it hand KV over
    borrows: bool  # kv_role lets it take KV over
    steps_alone: bool = True  # no other engine waits for the end of our steps


def read_facts(config: VllmConfig, cache: KVCacheConfig) -> tuple[Facts, Settings]:
    """Return what we know of this engine and its operator's choices.

    Raises :exc:`~xpyd_connector.errors.SettingsError` or :exc:`~xpyd_connector.errors.UnsupportedCache`
    in one sentence, which vLLM shows when it refuses to start.
    """
    transfer = config.kv_transfer_config
    settings = read_settings(transfer.kv_connector_extra_config, os.environ)
    _check_supported(config, cache)
    facts = Facts(
        engine=EngineId(transfer.engine_id),
        address=Address(settings.host, settings.port + config.parallel_config.data_parallel_index),
        block_size=config.cache_config.block_size,
        blocks=cache.num_blocks,
        ranks=config.parallel_config.tensor_parallel_size,
        lends=transfer.is_kv_producer,
        borrows=transfer.is_kv_consumer,
        # Data-parallel ranks of a mixture of experts step together: one that waits for its KV would hold up all others.
        steps_alone=config.parallel_config.data_parallel_size == 1,
    )
    return facts, settings


def _check_supported(config: VllmConfig, cache: KVCacheConfig) -> None:
    parallel = config.parallel_config
    if len(cache.kv_cache_groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups)
        raise UnsupportedCache(
            f"this model has {len(cache.kv_cache_groups)} KV cache groups ({kinds}); one is supported"
        )
    if parallel.pipeline_parallel_size != 1:
        raise UnsupportedCache(f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; only 1 is supported")
    if parallel.decode_context_parallel_size != 1:
        raise UnsupportedCache(
            f"decode_context_parallel_size is {parallel.decode_context_parallel_size}; only 1 is supported"
        )


def fingerprint(config: VllmConfig, settings: Settings) -> Fingerprint:
    """Return what peers compare; for a worker, once its layers exist (only they know their attention backend)."""
    model, parallel = config.model_config, config.parallel_config
    return Fingerprint(
        vllm=vllm_version,
        model=model.model,
        dtype=str(model.dtype),
        cache_dtype=str(config.cache_config.cache_dtype),
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        block_size=config.cache_config.block_size,
        layout=_layout(config.cache_config),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        attention=",".join(sorted({backend.get_name() for backend in get_current_attn_backends(config)})),
        mode=settings.mode.value,
    )


def _layout(cache_config: Any) -> str:
    layout = cache_config.get_resolved_kv_cache_layout()
    return str(getattr(layout, "name", layout))
