"""Torch's KV cache tensors, seen as regions of memory."""

import re
from collections.abc import Mapping

import torch

from xpyd_connector.core.messages import MemoryKind, Region
from xpyd_connector.errors import UnsupportedCache

MEMORY: Mapping[str, MemoryKind] = {
    "cpu": "DRAM",
    "cuda": "VRAM",
}  # device types NIXL registers directly -> its names for their memory


def describe_caches(caches: Mapping[str, torch.Tensor], blocks: int) -> tuple[Region, ...]:
    """Return one region per layer, in the order of the layers, for a cache of ``blocks`` blocks.

    Raises :exc:`~xpyd_connector.errors.UnsupportedCache` if a layer's blocks are not evenly spaced pieces of memory.
    """
    return tuple(_region(name, caches[name], blocks) for name in sorted(caches, key=_natural))


def place_of(caches: Mapping[str, torch.Tensor]) -> tuple[MemoryKind, int]:
    """Return NIXL's name of the memory and the device number; raises ``UnsupportedCache`` for other devices."""
    devices = {tensor.device for tensor in caches.values()}
    device = next(iter(devices))
    if len(devices) != 1 or device.type not in MEMORY:
        raise UnsupportedCache(
            f"the KV cache is on {', '.join(map(str, devices))}; one device of {', '.join(MEMORY)} is supported"
        )
    return MEMORY[device.type], device.index or 0


def spans_of(caches: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Return ``(address, bytes)`` of every allocation behind the tensors, each once: layers may share one."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in caches.values()}
    return sorted(storages.items())


def _region(name: str, tensor: torch.Tensor, blocks: int) -> Region:
    """The block is the outermost dimension; a kernel may cut one of vLLM's blocks into several of its own."""
    rows, item = tensor.shape[0], tensor.element_size()
    content = tensor[0].numel() * item
    if rows % blocks or not _packed(tensor[0]):
        raise UnsupportedCache(
            f"layer {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; its first dimension must "
            f"be a multiple of the {blocks} blocks and each block one piece of memory"
        )
    per_block, stride = rows // blocks, tensor.stride(0) * item
    if per_block > 1 and stride != content:
        raise UnsupportedCache(f"layer {name} has {per_block} kernel blocks a block with gaps between them")
    return Region(tensor.data_ptr(), content * per_block, stride * per_block, blocks)


def _packed(block: torch.Tensor) -> bool:
    """Whether a block's elements fill one piece of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _natural(name: str) -> list[tuple[int, str]]:
    """Order layer 10 after layer 2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
