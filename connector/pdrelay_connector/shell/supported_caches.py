"""Engines whose KV does not move, each with a sentence that says why: they do not start."""

from collections.abc import Mapping
from typing import Final

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.shell import vllm_versions
from pdrelay_connector.shell.cache_specs import specs_of

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
MAMBA_CACHE_MODES = ("none", "align")
# further ones mean something only with what the worker knows beside the cache
MAX_STATE_TENSORS = 2


def check_supported(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise :exc:`~pdrelay_connector.errors.UnsupportedCache` if an engine's KV does not move."""
    parallel = config.parallel_config
    for group in cache.kv_cache_groups:
        _check_group(group)
    has_state = any(
        isinstance(spec, MambaSpec)
        for group in cache.kv_cache_groups
        for spec in specs_of(group.kv_cache_spec)
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
    for spec in specs_of(group.kv_cache_spec):
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
            "(vLLM's NixlConnector of 0.32 and later moves it)"
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
