"""Torch tensors as regions of memory: read wrongly, every answer would be wrong."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, at its import
    import torch

from xpyd_connector.core.messages import Region
from xpyd_connector.errors import UnsupportedCache
from xpyd_connector.shell.caches import describe_caches, place_of, spans_of

BLOCKS, BLOCK = 4, (2, 3, 5)  # blocks, and what one holds
BYTES = 2 * 3 * 5 * 4


def cache(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def bytes_at(region, block):
    """Read one block of a region through its address alone, as NIXL does."""
    import ctypes

    return ctypes.string_at(region.base + block * region.stride, region.length)


def bytes_of(tensor):
    return tensor.contiguous().numpy().tobytes()


def test_a_contiguous_cache_is_one_run_of_blocks():
    """What vLLM allocates on CPU."""
    tensor = cache(BLOCKS, *BLOCK)
    (region,) = describe_caches({"l.0": tensor}, BLOCKS)

    assert region == Region(tensor.data_ptr(), BYTES, BYTES, BLOCKS)
    assert [bytes_at(region, block) for block in range(BLOCKS)] == [bytes_of(tensor[b]) for b in range(BLOCKS)]


def test_layers_are_in_the_order_of_their_numbers():
    """On both engines, whatever the order in which they were made: layer 2 before layer 10."""
    caches = {name: cache(BLOCKS, *BLOCK) for name in ("m.10.attn", "m.2.attn", "m.1.attn")}
    regions = describe_caches(caches, BLOCKS)

    assert [region.base for region in regions] == [caches[f"m.{n}.attn"].data_ptr() for n in (1, 2, 10)]


def test_layers_that_share_one_allocation_are_told_apart():
    """Packed caches: layer after layer within each block; the storage is registered once."""
    packed = cache(BLOCKS, 2, *BLOCK)
    caches = {"l.0": packed[:, 0], "l.1": packed[:, 1]}
    regions = describe_caches(caches, BLOCKS)

    assert [region.stride for region in regions] == [2 * BYTES] * 2
    for layer, region in enumerate(regions):
        assert [bytes_at(region, block) for block in range(BLOCKS)] == [
            bytes_of(packed[block, layer]) for block in range(BLOCKS)
        ]
    assert spans_of(caches) == [(packed.untyped_storage().data_ptr(), packed.numel() * 4)]


def test_dimensions_may_be_swapped_within_a_block():
    """Heads before tokens: the bytes of a block are one piece all the same."""
    tensor = cache(BLOCKS, *BLOCK)
    (region,) = describe_caches({"l.0": tensor.permute(0, 3, 1, 2)}, BLOCKS)

    assert bytes_at(region, 2) == bytes_of(tensor[2])


def test_a_block_may_consist_of_several_of_the_kernel():
    """A kernel with smaller blocks than vLLM's: two of its rows are one block."""
    tensor = cache(2 * BLOCKS, *BLOCK)
    (region,) = describe_caches({"l.0": tensor}, BLOCKS)

    assert region == Region(tensor.data_ptr(), 2 * BYTES, 2 * BYTES, BLOCKS)
    assert bytes_at(region, 1) == bytes_of(tensor[2:4])


@pytest.mark.parametrize(
    "tensor",
    [
        cache(2, BLOCKS, *BLOCK),  # keys and values outermost
        cache(BLOCKS + 1, *BLOCK),
        cache(2, BLOCKS, *BLOCK).transpose(0, 1),  # a block is two pieces
        cache(BLOCKS, *BLOCK)[:, :, ::2],  # with gaps in a block
        cache(1, *BLOCK).expand(BLOCKS, *BLOCK).transpose(0, 1),
    ],
    ids=["keys and values outermost", "one too many", "two pieces", "gaps", "not rows of blocks"],
)
def test_blocks_that_are_not_outermost_or_not_one_piece_are_refused(tensor):
    """With the shape in the sentence: the engine does not start instead of answering wrongly."""
    with pytest.raises(UnsupportedCache, match=r"layer l\.0 has shape"):
        describe_caches({"l.0": tensor}, BLOCKS)


def test_kernel_blocks_with_gaps_between_them_are_refused():
    """One block would not be one piece."""
    with pytest.raises(UnsupportedCache, match="2 kernel blocks a block with gaps"):
        describe_caches({"l.0": cache(2 * BLOCKS, 2, *BLOCK)[:, 0]}, BLOCKS)


def test_memory_has_nixls_name():
    """And a device number."""
    assert place_of({"l.0": cache(BLOCKS, *BLOCK)}) == ("DRAM", 0)


def test_other_devices_are_refused():
    """By name."""
    with pytest.raises(UnsupportedCache, match="meta"):
        place_of({"l.0": torch.empty(1, device="meta")})
    with pytest.raises(UnsupportedCache, match="one device"):
        place_of({"l.0": torch.empty(1), "l.1": torch.empty(1, device="meta")})
