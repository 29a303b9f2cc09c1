"""The properties of an engine, read from vLLM's configuration once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdrelay_connector.core.addresses import is_wildcard
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.buffer_device import is_staged, with_platform
from pdrelay_connector.core.layout.cache_groups import CacheGroup, left_out_tokens
from pdrelay_connector.errors import SettingsError, UnsupportedCache
from pdrelay_connector.settings import AUTO, Mode, Settings, read_settings
from pdrelay_connector.shell import vllm_versions
from pdrelay_connector.shell.building_engine import builder_of
from pdrelay_connector.shell.devices import check_copies, check_events
from pdrelay_connector.shell.first_token import first_token, looks_back

logger = init_logger("vllm.pdrelay")
SUPPORTED = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    RSWASpec,
    CircularBufferSpec,
    MambaSpec,
)
# Kinds that no transfer moves, in vLLM's NixlConnector of 0.33 neither, by their classes: why not.
_IMMOVABLE: Final[Mapping[str, str]] = {
    "CrossAttentionSpec": (
        "its KV is of the encoder, and vLLM allocates no block for it that a load could fill"
    ),
    "EncoderOnlyAttentionSpec": "an encoder keeps no KV",
    "HiddenStateCacheSpec": (
        "it keeps hidden states for extract_hidden_states, which no decode engine reads"
    ),
    "HiSparseHotSpec": "HiSparse keeps copies on the device that belong to one engine",
    "HiSparseResidentSpec": "HiSparse keeps copies on the device that belong to one engine",
    "SinkFullAttentionSpec": (
        "its kernel keeps static sinks in the first blocks, which no block table names"
    ),
}
IN_TREE: Final = "vLLM's NixlConnector of 0.32 and later moves it"
MAMBA_CACHE_MODES = ("none", "align")
# further ones mean something only with what the worker knows beside the cache
MAX_STATE_TENSORS = 2


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
    _check_supported(config, cache)
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
    specs = {name: spec for group in cache.kv_cache_groups for name, spec in _specs_by_layer(group)}
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
        packed_layers=frozenset(name for name, spec in specs.items() if _is_packed(spec)),
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
        group = _group(spec)
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


def _check_supported(config: VllmConfig, cache: KVCacheConfig) -> None:
    parallel = config.parallel_config
    for group in cache.kv_cache_groups:
        _check_group(group)
    has_state = any(
        isinstance(spec, MambaSpec)
        for group in cache.kv_cache_groups
        for spec in _specs(group.kv_cache_spec)
    )
    if has_state and getattr(config.cache_config, "use_kda_recoverssm", False):
        raise UnsupportedCache(
            "use_replayssm is on with drafts for KDA layers (RecoverSSM), whose records beside the "
            "cache do not move: start without --use-replayssm"
        )
    if config.model_config.enable_sleep_mode and not vllm_versions.FOLLOWS_SLEEP:
        raise UnsupportedCache(
            f"enable_sleep_mode is on, and vLLM {vllm_versions.VLLM_VERSION} does not tell a "
            f"connector when the memory "
            "goes that other engines reach: engines that sleep need vLLM 0.33 or later"
        )
    if vllm_versions.returns_routed_experts(config):
        raise UnsupportedCache(
            "enable_return_routed_experts is on; which experts computed a prompt is known where it "
            "was computed and "
            "does not move with its KV, so engines with a KV connector cannot return it"
        )
    sizes = {
        "decode": parallel.decode_context_parallel_size,
        "prefill": parallel.prefill_context_parallel_size,
    }
    for name, size in sizes.items():
        if size != 1 and not vllm_versions.DIVIDES_CONTEXTS:
            raise UnsupportedCache(
                f"{name}_context_parallel_size is {size}; with vLLM {vllm_versions.VLLM_VERSION} only "
                f"1 is supported: more needs vLLM 0.32 or later"
            )
    if sizes["prefill"] != 1:
        _check_prefill_contexts(config)


def _check_prefill_contexts(config: VllmConfig) -> None:
    """Raise unless vLLM's NixlConnector could do it, too (its ``__init__`` in 0.32)."""
    parallel = config.parallel_config
    prefill = parallel.prefill_context_parallel_size
    decode = parallel.decode_context_parallel_size
    if config.kv_transfer_config.is_kv_consumer:
        raise UnsupportedCache(
            f"prefill_context_parallel_size is {prefill} and kv_role is "
            f"{config.kv_transfer_config.kv_role}; with more than 1 only kv_producer is supported"
        )
    if decode > 1 and (parallel.tensor_parallel_size != 1 or decode != prefill):
        raise UnsupportedCache(
            f"prefill_context_parallel_size is {prefill}, decode_context_parallel_size {decode} and "
            f"tensor_parallel_size {parallel.tensor_parallel_size}; the first two must be equal, or "
            f"one of them 1, and with both the third must be 1"
        )


def _check_group(group: KVCacheGroupSpec) -> None:
    """Raise if the cache of some layers cannot be moved."""
    layer = (
        f"layer {group.layer_names[0]}"
        if group.layer_names
        else "a layer of another pipeline stage"
    )
    for spec in _specs(group.kv_cache_spec):
        kind = type(spec)
        if kind not in SUPPORTED:
            kinds = ", ".join(supported.__name__ for supported in SUPPORTED)
            reason = f" ({_IMMOVABLE[kind.__name__]})" if kind.__name__ in _IMMOVABLE else ""
            raise UnsupportedCache(
                f"{layer} has a KV cache of kind {kind.__name__}{reason}; supported are {kinds}"
            )
        if isinstance(spec, MambaSpec):
            _check_state(layer, spec)
        if isinstance(spec, CircularBufferSpec) or vllm_versions.replays_window(spec):
            _check_told_what_is_loaded(layer, "a ring of tokens or a replayed window")
        if isinstance(spec, AttentionSpec) and vllm_versions.tokens_per_entry(spec) < 1:
            raise UnsupportedCache(
                f"{layer} keeps several entries for a token (tokens_per_state is "
                f"{spec.tokens_per_state}); one entry for one or more tokens is supported"
            )
    if group.host_resident:
        raise UnsupportedCache(
            f"{layer} has a KV cache in host memory (host_resident), which does not move "
            f"({IN_TREE})"
        )
    if not group.enable_kv_transfer:
        raise UnsupportedCache(
            f"{layer} has a KV cache that vLLM keeps out of transfers (enable_kv_transfer is off)"
        )


def _check_told_what_is_loaded(layer: str, what: str) -> None:
    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        raise UnsupportedCache(
            f"{layer} keeps {what}, and vLLM {vllm_versions.VLLM_VERSION} zeroes the blocks that a "
            "load fills, or computes them anew: models with it need vLLM 0.32 or later"
        )


def _check_state(layer: str, spec: MambaSpec) -> None:
    """Raise if the state of a layer cannot be moved, or if moving it was not shown to be right."""
    _check_told_what_is_loaded(layer, "a state")
    if spec.mamba_cache_mode not in MAMBA_CACHE_MODES:
        raise UnsupportedCache(
            f"{layer} keeps a state and mamba_cache_mode is {spec.mamba_cache_mode}, which vLLM "
            "0.32 does not have any more: start with --mamba-cache-mode align"
        )
    if len(spec.shapes) > MAX_STATE_TENSORS:
        raise UnsupportedCache(
            f"{layer} keeps a state of {len(spec.shapes)} tensors; a convolution's and a recurrent "
            "one are supported, without the inputs that ReplaySSM or RecoverSSM keep beside them"
        )


def _staging_blocks(config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> int:
    if not _is_staged_here(config, settings):
        return 0
    check_copies(current_platform.device_type, current_platform)
    sizes = (
        group.kv_cache_spec.block_size
        for group in cache.kv_cache_groups
        if not _group(group.kv_cache_spec).is_ring
    )
    smallest = min(sizes)
    return settings.staging_blocks or 2 * -(-config.model_config.max_model_len // smallest)


def _is_staged_here(config: VllmConfig, settings: Settings) -> bool:
    """Return whether KV goes through host memory."""
    device = current_platform.device_type
    buffers = with_platform(current_platform.get_nixl_supported_devices())
    buffer = config.kv_transfer_config.kv_buffer_device
    return is_staged(device, buffer, host_staging=settings.host_staging, buffers=buffers)


def _specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specs of a group's layers: several if they differ in size only."""
    return (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )


def _specs_by_layer(group: KVCacheGroupSpec) -> list[tuple[str, KVCacheSpec]]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.items())
    return [(name, spec) for name in group.layer_names]


def _is_packed(spec: KVCacheSpec) -> bool:
    """Tell whether a kernel may keep a block's entries in several pieces, as values and scales.

    Indexers do (``v1/attention/ops/...indexer_k_quant_and_cache``), and the caches of DeepSeek-V4
    and NVFP4: their type is bytes, or quantized with more than one scale for a tensor.
    """
    if not isinstance(spec, AttentionSpec) or isinstance(spec, CircularBufferSpec):
        return False
    is_plain = spec.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR or (
        spec.kv_quant_mode is KVQuantMode.NONE and spec.dtype is not torch.uint8
    )
    return (
        not is_plain
        or vllm_versions.tokens_per_entry(spec) != 1
        or getattr(spec, "model_version", None) is not None
    )


def _group(spec: KVCacheSpec) -> CacheGroup:
    specs = _specs(spec)
    first = specs[0]
    if isinstance(first, MambaSpec):
        return CacheGroup(spec.block_size, state=", ".join(dict.fromkeys(map(_state, specs))))
    if isinstance(first, CircularBufferSpec):
        return CacheGroup(
            spec.block_size, state=", ".join(dict.fromkeys(map(_ring, specs))), is_ring=True
        )
    retained = getattr(first, "extra_retained_tokens", 0)
    window = first.sliding_window + retained if isinstance(first, SlidingWindowSpec) else 0
    chunk = first.attention_chunk_size if isinstance(first, ChunkedLocalAttentionSpec) else 0
    return CacheGroup(
        spec.block_size,
        window,
        chunk,
        forgets_answers=isinstance(first, RSWASpec),
        is_replayed=vllm_versions.replays_window(first),
    )


def _ring(spec: KVCacheSpec) -> str:
    """Describe a ring of tokens: each token is at its number modulo the ring's size."""
    if not isinstance(spec, CircularBufferSpec):
        raise TypeError(f"{type(spec).__name__} among rings")
    return f"ring of {spec.block_size} tokens of {spec.num_heads} x {spec.state_content_size_bytes} bytes {spec.dtype}"


def _state(spec: KVCacheSpec) -> str:
    """Return the kind of a state, and the shape and dtype of each of its tensors on one rank."""
    if not isinstance(spec, MambaSpec):
        raise TypeError(f"{type(spec).__name__} among states")
    tensors = (
        f"{tuple(shape)} {dtype}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"{spec.mamba_type.name} state of {' and '.join(tensors)}"
