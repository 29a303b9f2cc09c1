"""What a transfer depends on in vLLM's specs of KV caches (``v1/kv_cache_interface.py``)."""

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.shell import vllm_versions


def specs_of(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specs of a group's layers: several if they differ in size only."""
    return (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )


def specs_by_layer(group: KVCacheGroupSpec) -> list[tuple[str, KVCacheSpec]]:
    """Return the layers of a group, each with its spec."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.items())
    return [(name, spec) for name in group.layer_names]


def is_packed(spec: KVCacheSpec) -> bool:
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


def group_of(spec: KVCacheSpec) -> CacheGroup:
    """Return what the layers of a KV cache group keep."""
    specs = specs_of(spec)
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
