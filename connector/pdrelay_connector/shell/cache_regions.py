"""Describes torch's KV cache tensors as regions of memory."""

import re
from collections.abc import Mapping
from enum import Enum, auto

import torch
from msgspec.structs import replace

from pdrelay_connector.core.messages import MemoryKind, Region
from pdrelay_connector.errors import UnsupportedCache
from pdrelay_connector.shell.engine_config import EngineConfig

MEMORY: Mapping[str, MemoryKind] = {
    "cpu": "DRAM",
    "cuda": "VRAM",
}  # device types NIXL registers directly -> its names for their memory


class KernelLayout(Enum):
    """How an attention kernel orders the content of a block."""

    ENTRIES = auto()  # K and V of one token and head are adjacent
    TRANSPOSED = auto()  # each head of a row: all K by dimension, then all V by token
    OPAQUE = auto()  # unknown: only equal engines can exchange such blocks


def own_caches(
    caches: Mapping[str, torch.Tensor], layers: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the caches of ``layers``, which are in the KV cache groups at the connector's start.

    vLLM passes more: layers that share the cache of another one (as in Gemma 3n) join the groups
    later (``maybe_add_kv_sharing_layers_to_kv_cache_groups`` in
    ``vllm/v1/worker/gpu_model_runner.py``). Raises
    :exc:`~pdrelay_connector.errors.UnsupportedCache` for any other layer: its KV would not be
    moved.
    """
    own = {name: cache for name, cache in caches.items() if name in layers}
    moved = {cache.data_ptr() for cache in own.values()}
    for name, cache in caches.items():
        if cache.data_ptr() not in moved:
            raise UnsupportedCache(
                f"layer {name} is in no KV cache group, and its cache is of no layer that is"
            )
    return own


def describe_caches(
    caches: Mapping[str, torch.Tensor],
    engine_config: EngineConfig,
    blocks: int,
    kernel_layout: KernelLayout,
) -> tuple[Region, ...]:
    """Return the regions of all layers in order, for a cache of ``blocks`` blocks.

    vLLM 0.32 passes every layer as ``(rows, heads, tokens, content)``; its strides express the
    layout (``create_kv_cache_views`` in ``vllm/v1/kv_cache_interface.py``). Raises
    :exc:`~pdrelay_connector.errors.UnsupportedCache` for a layer of another shape.
    """
    names = sorted(caches, key=_natural)
    whole = [_described(name, caches[name], engine_config, blocks, kernel_layout) for name in names]
    if kernel_layout is not KernelLayout.TRANSPOSED or any(region.opaque for region in whole):
        return tuple(whole)
    items = [caches[name].element_size() for name in names]
    return tuple(
        part
        for region, item in zip(whole, items, strict=True)
        for part in ((region,) if region.state else _halves(region, item))
    )


def _described(
    name: str,
    cache: torch.Tensor,
    engine_config: EngineConfig,
    blocks: int,
    kernel_layout: KernelLayout,
) -> Region:
    group = engine_config.groups[engine_config.layers[name]]
    if group.is_ring:
        return _ring(name, cache, engine_config, blocks)
    if group.state:
        return _state(name, cache, engine_config, blocks)
    return _mark_opaque(_region(name, cache, engine_config, blocks), engine_config, kernel_layout)


def _state(name: str, cache: torch.Tensor, engine_config: EngineConfig, blocks: int) -> Region:
    """Return the region of a layer with a state: its tensors side by side, one row a block."""
    if cache.shape[:3] != (blocks, 1, 1) or cache.stride(3) != 1:
        raise UnsupportedCache(
            f"layer {name} keeps its states with shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}; expected is one row in one piece for each of the {blocks} blocks"
        )
    return _state_region(name, cache, engine_config, cache.shape[3], (0, 0))


def _ring(name: str, cache: torch.Tensor, engine_config: EngineConfig, blocks: int) -> Region:
    """Return the region of a layer with a ring of the last tokens: each block is one entry."""
    extent = 1 + sum(
        (number - 1) * stride
        for number, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True)
    )
    if cache.dim() != 4 or cache.shape[0] != blocks or extent != cache[0].numel():
        raise UnsupportedCache(
            f"layer {name} keeps a ring with shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}; expected are the 4 dimensions blocks ({blocks}), heads, tokens and "
            "content, each block in one piece: with several heads use a KV cache layout that ends "
            "with HNC or NHC"
        )
    strides = cache.stride(1) if cache.shape[1] > 1 else 0, cache.stride(2)
    return _state_region(name, cache, engine_config, extent, strides)


def _state_region(
    name: str,
    cache: torch.Tensor,
    engine_config: EngineConfig,
    width: int,
    strides: tuple[int, int],
) -> Region:
    """Return the region of a layer with one entry a block; ``width`` is in elements.

    ``strides`` (in elements): of heads and tokens within the entry; they must be equal on both
    engines.
    """
    item = cache.element_size()
    return Region(
        layer=name,
        base=cache.data_ptr(),
        count=cache.shape[0],
        heads=1,
        tokens=1,
        width=width * item,
        row_stride=cache.stride(0) * item,
        head_stride=strides[0] * item,
        token_stride=strides[1] * item,
        group=engine_config.layers[name],
        all_heads=engine_config.ranks,  # each rank has its own part
        state=True,
    )


def _halves(region: Region, item: int) -> tuple[Region, Region]:
    """Return K and V of a layer on a CPU.

    In K, each dimension keeps all tokens of a row in one piece.
    """
    half = region.width // 2
    k = replace(
        region, width=item, token_stride=item, parts=half // item, part_stride=region.tokens * item
    )
    v = replace(region, base=region.base + region.tokens * half, width=half, token_stride=half)
    return k, v


def _mark_opaque(
    region: Region, engine_config: EngineConfig, kernel_layout: KernelLayout
) -> Region:
    """Mark a region opaque if its kernel layout is unknown, or its heads are K and V."""
    heads = max(1, engine_config.all_heads // engine_config.ranks)
    is_cut = kernel_layout is KernelLayout.ENTRIES or (
        kernel_layout is KernelLayout.TRANSPOSED and region.token_stride == region.width
    )
    is_packed = region.layer in engine_config.packed_layers
    return replace(region, opaque=not is_cut or is_packed or region.heads != heads)


def place_of(caches: Mapping[str, torch.Tensor]) -> tuple[MemoryKind, int]:
    """Return NIXL's name of the memory, and the device number; raises ``UnsupportedCache``."""
    devices = {tensor.device for tensor in caches.values()}
    device = next(iter(devices))
    if len(devices) != 1 or device.type not in MEMORY:
        raise UnsupportedCache(
            f"the KV cache is on {', '.join(map(str, devices))}; one device of {', '.join(MEMORY)} "
            f"is supported"
        )
    return MEMORY[device.type], device.index or 0


def spans_of(caches: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Return ``(address, bytes)`` of every allocation of the tensors.

    Layers may share one; it occurs once.
    """
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in caches.values()
    }
    return sorted(storages.items())


def _region(name: str, cache: torch.Tensor, engine_config: EngineConfig, blocks: int) -> Region:
    if cache.dim() != 4 or cache.shape[0] % blocks or (cache.shape[3] > 1 and cache.stride(3) != 1):
        raise UnsupportedCache(
            f"layer {name} has shape {tuple(cache.shape)} and strides {cache.stride()}; expected "
            f"are the 4 dimensions rows (a multiple of the {blocks} blocks), heads, tokens and "
            "content, the last in one piece"
        )
    count, heads, tokens, content = cache.shape
    item = cache.element_size()
    group = engine_config.layers[name]
    rows = count // blocks
    shards = engine_config.groups[group].shards
    block_size = engine_config.groups[group].block_size // shards
    covers = engine_config.tokens_per_entry.get(name, 1)
    if rows * tokens * covers != block_size:
        raise UnsupportedCache(
            f"layer {name} keeps {rows * tokens} entries a block for {block_size} tokens; expected "
            f"is one for each {covers} of them"
        )
    return Region(
        layer=name,
        base=cache.data_ptr(),
        count=count,
        heads=heads,
        tokens=tokens,
        width=content * item,
        row_stride=cache.stride(0) * item,
        head_stride=cache.stride(1) * item,
        token_stride=cache.stride(2) * item,
        rows=rows,
        covers=covers,
        group=group,
        all_heads=heads * engine_config.ranks
        if heads > 1
        else min(engine_config.all_heads, engine_config.ranks),
        shards=shards,
        interleave=engine_config.interleave if shards > 1 else 1,
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders layer 10 after layer 2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
