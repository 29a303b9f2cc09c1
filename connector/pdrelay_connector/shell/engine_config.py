"""The properties of an engine, read from vLLM's configuration once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

from pdrelay_connector.core.addresses import is_wildcard
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.buffer_device import is_staged, with_platform
from pdrelay_connector.core.layout.cache_groups import CacheGroup, left_out_tokens
from pdrelay_connector.errors import SettingsError, UnsupportedCache
from pdrelay_connector.settings import AUTO, Mode, Settings, read_settings
from pdrelay_connector.shell import vllm_versions
from pdrelay_connector.shell.building_engine import builder_of
from pdrelay_connector.shell.cache_specs import group_of, is_packed, specs_by_layer
from pdrelay_connector.shell.devices import check_copies, check_events
from pdrelay_connector.shell.first_token import first_token, looks_back
from pdrelay_connector.shell.supported_caches import check_supported

logger = init_logger("vllm.pdrelay")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The properties of an engine that matter for KV transfer."""

    engine: EngineId
    address: Address  # of this data-parallel rank's side channel
    groups: tuple[CacheGroup, ...]
    layers: Mapping[str, int]  # KV cache group by layer name
    blocks: int
    all_heads: int  # KV heads of a layer over all ranks; 1 if every rank has the same (MLA)
    ranks: int  # tensor-parallel size
    is_producer: bool  # by kv_role: it prefills for decode engines
    is_consumer: bool  # by kv_role: it loads KV
    staging_blocks: int = 0  # slots for each KV cache group in host memory; 0: no staging
    steps_independently: bool = True  # False: data-parallel ranks step together
    stages: int = 1  # pipeline-parallel size
    shards: int = 1  # decode-context-parallel size
    # prefill-context-parallel size: so many workers keep the same of a rank, or are the ranks that
    # divide a context
    contexts: int = 1
    # tokens that each of these ranks keeps in turn: vLLM decides it in each worker, before this
    interleave: int = 1
    prefix_hash: str = ""  # vLLM's hash of cached blocks; "": return_kv is off, or cannot be on
    recomputes: bool = True  # a load that fails costs a prefill, not the request
    # what routers are told of it, in pull
    first_token: Mapping[str, Any] = field(default_factory=dict[str, Any])
    looks_back: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the same, in both modes
    lookahead: int = 0  # tokens that drafts read beyond those computed
    # by layer, where not 1
    tokens_per_entry: Mapping[str, int] = field(default_factory=dict[str, int])
    sleeps: bool = False  # its memory may go away, and come back
    # the order within their blocks is unknown, whatever the kernel
    packed_layers: frozenset[str] = frozenset()

    @property
    def left_out_tokens(self) -> int:
        """How many of the last prompt tokens are not computed for another engine."""
        return left_out_tokens(self.groups, self.lookahead)

    def loaded_tokens(self, prompt_tokens: int) -> int:
        """Return up to which token KV may be loaded: the logits need the last one computed."""
        return max(0, prompt_tokens - max(1, self.left_out_tokens))


class WorkerRank(NamedTuple):
    """Which worker of an engine this is."""

    tensor: int
    stage: int = 0  # of the pipeline
    is_copy: bool = False  # another worker keeps the same, and serves it


def read_engine_config(config: VllmConfig, cache: KVCacheConfig) -> tuple[EngineConfig, Settings]:
    """Return the properties of this engine, and its settings.

    Raises :exc:`~pdrelay_connector.errors.SettingsError` or
    :exc:`~pdrelay_connector.errors.UnsupportedCache` with a sentence that vLLM logs as it refuses
    to start.
    """
    transfer = config.kv_transfer_config
    settings = read_settings(transfer.kv_connector_extra_config, os.environ, transfer.kv_connector)
    check_supported(config, cache)
    scheduled_by = _scheduled_by(transfer)
    if transfer.is_kv_consumer and not scheduled_by.is_kv_consumer:
        raise SettingsError(
            f"kv_role is {transfer.kv_role} here and {scheduled_by.kv_role} in MultiConnector, by "
            f"which vLLM goes: it would give loads blocks that a step still writes into; set "
            f"MultiConnector's kv_role to kv_both"
        )
    if settings.mode is Mode.AUTO and _is_staged_here(config, settings):
        raise SettingsError(
            'mode is "auto" and KV goes through host memory; set mode to "pull" or "push" on all '
            "engines"
        )
    other_backends = [backend.name for backend in settings.backends if backend.name != "UCX"]
    if config.model_config.enable_sleep_mode and other_backends:
        raise SettingsError(
            f"enable_sleep_mode is on, and NIXL's backend {other_backends[0]} may keep the memory that "
            f"goes away; use UCX alone"
        )
    if transfer.is_kv_producer and settings.mode.pushes:
        check_events(current_platform.device_type)
    model = config.model_config
    groups = _groups(config, cache)
    lookahead = vllm_versions.drafts_lookahead(config)
    specs = {name: spec for group in cache.kv_cache_groups for name, spec in specs_by_layer(group)}
    engine_config = EngineConfig(
        engine=EngineId(transfer.engine_id),
        address=Address(settings.host, settings.port + config.parallel_config.data_parallel_index),
        groups=groups,
        layers={
            name: number
            for number, group in enumerate(cache.kv_cache_groups)
            for name in group.layer_names
        },
        blocks=cache.num_blocks,
        all_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        ranks=_ranks(config.parallel_config),
        is_producer=transfer.is_kv_producer,
        is_consumer=transfer.is_kv_consumer,
        staging_blocks=_staging_blocks(config, cache, settings),
        # Data-parallel ranks of a mixture of experts step together: a rank that waits for KV would
        # delay all others.
        steps_independently=config.parallel_config.data_parallel_size == 1,
        stages=config.parallel_config.pipeline_parallel_size,
        shards=config.parallel_config.decode_context_parallel_size,
        contexts=config.parallel_config.prefill_context_parallel_size,
        interleave=config.parallel_config.cp_kv_cache_interleave_size
        if config.parallel_config.decode_context_parallel_size > 1
        else 1,
        prefix_hash=_prefix_hash(config, settings, groups),
        recomputes=not settings.return_kv or scheduled_by.kv_load_failure_policy == "recompute",
        first_token=first_token(config, left_out_tokens(groups, lookahead))
        if settings.mode.pulls
        else {},
        looks_back=looks_back(config),
        lookahead=lookahead,
        tokens_per_entry={
            name: tokens
            for name, spec in specs.items()
            if (tokens := vllm_versions.tokens_per_entry(spec)) != 1
        },
        sleeps=model.enable_sleep_mode,
        packed_layers=frozenset(name for name, spec in specs.items() if is_packed(spec)),
    )
    _check_stages(engine_config)
    _check_contexts(engine_config)
    return engine_config, settings


def _scheduled_by(transfer: KVTransferConfig) -> KVTransferConfig:
    """Return the configuration that vLLM's scheduler goes by: MultiConnector's if we are in it."""
    scheduler = builder_of(Scheduler)  # absent in workers
    config = transfer if scheduler is None else scheduler.vllm_config.kv_transfer_config
    return config or transfer


def _groups(config: VllmConfig, cache: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Return what each KV cache group keeps."""
    is_zeroed = vllm_versions.zeroes_blocks(cache)
    contexts = config.parallel_config.decode_context_parallel_size
    groups: list[CacheGroup] = []
    for spec in (group.kv_cache_spec for group in cache.kv_cache_groups):
        group = group_of(spec)
        shards = contexts if vllm_versions.is_divided(spec) else 1
        groups.append(
            replace(
                group,
                is_zeroed=is_zeroed and not group.state,
                block_size=group.block_size * shards,
                shards=shards,
            )
        )
    return tuple(groups)


def _ranks(parallel: ParallelConfig) -> int:
    """Return how many ranks have KV of a layer, without copies that prefill contexts make of it."""
    contexts: int = parallel.prefill_context_parallel_size
    tensors: int = parallel.tensor_parallel_size
    return contexts if min(contexts, parallel.decode_context_parallel_size) > 1 else tensors


def _check_stages(engine_config: EngineConfig) -> None:
    if engine_config.stages == 1:
        return
    if engine_config.staging_blocks or any(group.state for group in engine_config.groups):
        kind = "host staging" if engine_config.staging_blocks else "a model that keeps a state"
        raise UnsupportedCache(
            f"pipeline_parallel_size is {engine_config.stages}; with {kind} only 1 is supported"
        )


def _check_contexts(engine_config: EngineConfig) -> None:
    """Raise if ranks share a context in a way that was not shown to be right."""
    if engine_config.shards == engine_config.contexts == 1:
        return
    name = "decode" if engine_config.shards > 1 else "prefill"
    groups = engine_config.groups
    shared = [group for group in groups if group.shards > 1 or engine_config.contexts > 1]
    reasons = {
        "pipeline stages": engine_config.stages > 1,
        "host staging": engine_config.staging_blocks > 0,
        "compressed vectors": bool(engine_config.tokens_per_entry),
        "a window, a chunk, a ring or a state that ranks share": any(
            group.frees_early or group.forgets_answers or group.state for group in shared
        ),
    }
    for kind, holds in reasons.items():
        if holds:
            size = max(engine_config.shards, engine_config.contexts)
            raise UnsupportedCache(
                f"{name}_context_parallel_size is {size}; with {kind} only 1 is supported"
            )


def _prefix_hash(config: VllmConfig, settings: Settings, groups: tuple[CacheGroup, ...]) -> str:
    """Return the hash of cached blocks if this engine can lend them (``return_kv``).

    With ``auto`` an engine that cannot lend starts without; otherwise it raises ``SettingsError``.
    Untested combinations are refused, such as groups that do not keep all tokens, and drafts. In
    push, workers stage only the blocks that they write, not those that are read.
    """
    if not settings.return_kv:
        return ""
    transfer = config.kv_transfer_config
    reasons = {
        f"kv_role is {transfer.kv_role}, not kv_both": not (
            transfer.is_kv_producer and transfer.is_kv_consumer
        ),
        "the model has several KV cache groups": len(groups) != 1,
        "its layers do not keep all tokens": any(
            group.state or group.frees_early or group.forgets_answers for group in groups
        ),
        "speculative decoding is on": config.speculative_config is not None,
        "ranks divide a context among them": any(group.shards > 1 for group in groups),
        "prefix caching is off": not config.cache_config.enable_prefix_caching,
        "VLLM_NIXL_SIDE_CHANNEL_HOST is no address that others can dial": is_wildcard(
            settings.host
        ),
        "KV is pushed through host memory": settings.mode is Mode.PUSH
        and _is_staged_here(config, settings),
    }
    for reason, holds in reasons.items():
        if holds and settings.return_kv == AUTO:
            logger.info(
                "pdrelay: KV of answers does not go back here (return_kv is auto): %s", reason
            )
            return ""
        if holds:
            raise SettingsError(f"return_kv is on and {reason}; switch return_kv off")
    return str(config.cache_config.prefix_caching_hash_algo)


def _staging_blocks(config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> int:
    if not _is_staged_here(config, settings):
        return 0
    check_copies(current_platform.device_type, current_platform)
    sizes = (
        group.kv_cache_spec.block_size
        for group in cache.kv_cache_groups
        if not group_of(group.kv_cache_spec).is_ring
    )
    smallest = min(sizes)
    return settings.staging_blocks or 2 * -(-config.model_config.max_model_len // smallest)


def _is_staged_here(config: VllmConfig, settings: Settings) -> bool:
    """Return whether KV goes through host memory."""
    device = current_platform.device_type
    buffers = with_platform(current_platform.get_nixl_supported_devices())
    buffer = config.kv_transfer_config.kv_buffer_device
    return is_staged(device, buffer, host_staging=settings.host_staging, buffers=buffers)
