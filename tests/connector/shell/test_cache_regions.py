"""Torch tensors as regions of memory: read wrongly, every answer would be wrong."""

import ctypes
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    import torch

    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches, own_caches, place_of, spans_of
    from pdrelay_connector.shell.engine_config import EngineConfig

from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.messages import Region
from pdrelay_connector.errors import UnsupportedCache

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
BLOCKS = 4
HEADS = 2
TOKENS = 3
CONTENT = 5
WIDTH = CONTENT * 4  # bytes of one token and head
# Where each of blocks, heads and tokens is in memory, outermost first; content is always innermost. L: other layers.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def engine_config(*groups, layers=("l.0",), all_heads=HEADS, ranks=1):
    groups = groups or (CacheGroup(TOKENS),)
    numbers = {name: min(number, len(groups) - 1) for number, name in enumerate(layers)}
    return EngineConfig(
        EngineId("e"),
        Address("127.0.0.1", 1),
        groups,
        numbers,
        BLOCKS,
        all_heads,
        ranks,
        is_producer=True,
        is_consumer=True,
    )


def describe(caches, *groups, interior=KernelLayout.ENTRIES, **changes):
    return describe_caches(caches, engine_config(*groups, layers=tuple(caches), **changes), BLOCKS, interior)


def laid_out(layout, layers=1, rows=BLOCKS, heads=HEADS, tokens=TOKENS, content=CONTENT):
    """Return every layer as vLLM hands it over: rows, heads, tokens, content, whatever the layout."""
    sizes = {"L": layers, "B": rows, "H": heads, "N": tokens, "C": content}
    sides = [sizes[axis] for axis in layout]
    memory = torch.arange(torch.Size(sides).numel(), dtype=torch.float32).reshape(sides)
    return list(memory.permute([layout.index(axis) for axis in "LBHNC"]))


def entry(region, row, head, token):
    """Read what a region has of one token and head through addresses alone, as NIXL does."""
    place = region.base + row * region.row_stride + head * region.head_stride + token * region.token_stride
    return b"".join(ctypes.string_at(place + part * region.part_stride, region.width) for part in range(region.parts))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_entry_is_where_its_strides_say(layout):
    """In every layout that vLLM has, in every layer: the view is the same, the strides differ."""
    layers = laid_out(layout, layers=3)
    regions = describe({f"l.{number}": layer for number, layer in enumerate(layers)})

    for region, layer in zip(regions, layers, strict=True):
        for row, head, token in torch.cartesian_prod(*map(torch.arange, (BLOCKS, HEADS, TOKENS))).tolist():
            assert entry(region, row, head, token) == layer[row, head, token].numpy().tobytes()


def test_a_layer_that_uses_anothers_cache_is_moved_with_that():
    """Gemma 3n's last layers are in no group when the connector is made, and vLLM passes them later."""
    first, second = laid_out("LBHNC", layers=2)
    caches = {"l.0": first, "l.1": second, "l.2": first, "l.3": second}

    assert own_caches(caches, {"l.0": 0, "l.1": 0}) == {"l.0": first, "l.1": second}


def test_a_layer_that_nobody_knows_is_refused():
    """Its KV would not be moved."""
    first, second = laid_out("LBHNC", layers=2)

    with pytest.raises(UnsupportedCache, match=r"layer l\.1 is in no KV cache group"):
        own_caches({"l.0": first, "l.1": second}, {"l.0": 0})


def test_a_contiguous_cache_is_one_run_of_blocks():
    """What vLLM allocates on CPU."""
    (layer,) = laid_out("LBHNC")
    (region,) = describe({"l.0": layer})

    assert region == Region(
        layer.data_ptr(), BLOCKS, HEADS, TOKENS, WIDTH, HEADS * TOKENS * WIDTH, TOKENS * WIDTH, WIDTH, all_heads=HEADS,
        layer="l.0",
    )  # fmt: skip
    assert (region.blocks, region.block_size) == (BLOCKS, TOKENS)


def test_layers_are_in_the_order_of_their_numbers():
    """On both engines, whatever the order in which they were made: layer 2 before layer 10."""
    caches = {name: laid_out("LBHNC")[0] for name in ("m.10.attn", "m.2.attn", "m.1.attn")}
    regions = describe(caches)

    assert [region.base for region in regions] == [caches[f"m.{n}.attn"].data_ptr() for n in (1, 2, 10)]


def test_layers_that_share_one_allocation_are_registered_once():
    """Packed caches: layer after layer within each block."""
    layers = laid_out("BLHNC", layers=2)
    caches = {"l.0": layers[0], "l.1": layers[1]}
    regions = describe(caches)

    assert [region.row_stride for region in regions] == [2 * HEADS * TOKENS * WIDTH] * 2
    assert spans_of(caches) == [(layers[0].untyped_storage().data_ptr(), 2 * layers[0].numel() * 4)]


def test_a_block_may_consist_of_several_of_the_kernel():
    """A kernel with smaller blocks than vLLM's: two of its rows are one block."""
    (layer,) = laid_out("LBHNC", rows=2 * BLOCKS)
    (region,) = describe({"l.0": layer}, CacheGroup(2 * TOKENS))

    assert (region.count, region.rows, region.blocks, region.block_size) == (2 * BLOCKS, 2, BLOCKS, 2 * TOKENS)


def test_layers_know_their_group():
    """Each group has block tables of its own, and maybe blocks of another size."""
    caches = {"l.0": laid_out("LBHNC")[0], "l.1": laid_out("LBHNC", tokens=2 * TOKENS)[0]}
    groups = (CacheGroup(TOKENS), CacheGroup(2 * TOKENS, window=4))
    regions = describe(caches, *groups)

    assert [(region.group, region.block_size) for region in regions] == [(0, TOKENS), (1, 2 * TOKENS)]


@pytest.mark.parametrize(
    ("heads", "all_heads", "ranks", "says"),
    [
        (2, 8, 4, 8),
        (1, 4, 4, 4),
        (1, 2, 4, 2),  # each head on two ranks
        (1, 1, 4, 1),  # MLA, or one head on every rank
        (1, 1, 1, 1),
        (8, 8, 1, 8),
    ],
)
def test_a_region_knows_how_many_heads_its_layer_has_on_all_ranks(heads, all_heads, ranks, says):
    """From that a peer of another size knows which of them are here."""
    (layer,) = laid_out("LBHNC", heads=heads)
    (region,) = describe({"l.0": layer}, all_heads=all_heads, ranks=ranks)

    assert region.all_heads == says


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT),  # keys and values apart
        torch.zeros(BLOCKS, HEADS * TOKENS * CONTENT),
        torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT),
        torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., ::2],  # with gaps in an entry
    ],
    ids=["five dimensions", "two dimensions", "one row too many", "gaps"],
)
def test_anything_but_rows_heads_tokens_and_content_in_one_piece_is_refused(tensor):
    """With the shape in the sentence: the engine does not start instead of answering wrongly."""
    with pytest.raises(UnsupportedCache, match=r"layer l\.0 has shape"):
        describe({"l.0": tensor})


def test_a_layer_that_does_not_keep_one_entry_for_each_token_is_refused():
    """Compressed caches: the tokens of an entry are unknown."""
    with pytest.raises(UnsupportedCache, match=r"layer l\.0 keeps 3 entries a block for 4 tokens"):
        describe({"l.0": laid_out("LBHNC")[0]}, CacheGroup(4))


def test_on_a_cpu_k_and_v_are_two_regions():
    """Its kernel keeps K dimension by dimension and then V token by token, in the part of a row that is a head's."""
    size = 3  # of a head
    (layer,) = laid_out("LBHNC", content=2 * size)
    k, v = torch.randn(2, BLOCKS, HEADS, TOKENS, size)
    kept = layer.view(BLOCKS, HEADS, 2 * size * TOKENS)
    kept[:, :, : size * TOKENS] = k.transpose(2, 3).reshape(BLOCKS, HEADS, -1)
    kept[:, :, size * TOKENS :] = v.reshape(BLOCKS, HEADS, -1)
    regions = describe({"l.0": layer}, interior=KernelLayout.TRANSPOSED)

    assert [(region.parts, region.width, region.opaque) for region in regions] == [(3, 4, False), (1, 12, False)]
    for region, half in zip(regions, (k, v), strict=True):
        for row, head, token in torch.cartesian_prod(*map(torch.arange, (BLOCKS, HEADS, TOKENS))).tolist():
            assert entry(region, row, head, token) == half[row, head, token].numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", "BLHNC", "BHLNC"])
def test_k_and_v_together_are_every_byte_of_a_layer_once(layout, dtype):
    """Wherever its rows are; in the order of the layers, K before V, on both engines."""
    size = 4  # of a head
    layers = [layer.to(dtype) for layer in laid_out(layout, layers=2, rows=2 * BLOCKS, content=2 * size)]
    regions = describe(
        {f"l.{number}": layer for number, layer in enumerate(layers)},
        CacheGroup(2 * TOKENS),
        interior=KernelLayout.TRANSPOSED,
    )

    assert [region.parts for region in regions] == [size, 1] * 2
    for number, layer in enumerate(layers):
        pair = regions[2 * number : 2 * number + 2]
        assert all((r.count, r.rows, r.block_size, r.all_heads) == (2 * BLOCKS, 2, 2 * TOKENS, HEADS) for r in pair)
        found = [byte for region in pair for byte in bytes_of(region)]
        ours = [layer[row, head].data_ptr() for row in range(2 * BLOCKS) for head in range(HEADS)]
        piece = TOKENS * 2 * size * layer.element_size()
        assert sorted(found) == sorted(start + byte for start in ours for byte in range(piece))


def bytes_of(region):
    """Return the address of every byte that a region describes."""
    sides = (region.count, region.heads, region.tokens, region.parts, region.width)
    strides = (region.row_stride, region.head_stride, region.token_stride, region.part_stride, 1)
    places = torch.cartesian_prod(*map(torch.arange, sides)) @ torch.tensor(strides)
    return (places + region.base).tolist()


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_where_a_heads_tokens_are_not_in_one_piece_we_do_not_guess_what_a_cpu_keeps_there(layout):
    """The kernel was looked at in the other layouts only."""
    (region,) = describe({"l.0": laid_out(layout, content=6)[0]}, interior=KernelLayout.TRANSPOSED)

    assert region.opaque


def test_what_a_kernel_does_that_we_do_not_know_is_not_cut():
    """Whole rows move between twins all the same."""
    (region,) = describe({"l.0": laid_out("LBHNC")[0]}, interior=KernelLayout.OPAQUE)

    assert region.opaque


def test_a_dimension_of_heads_that_are_not_kv_heads_is_not_cut():
    """Some kernels keep K and V as if they were heads."""
    (layer,) = laid_out("LBHNC", heads=2 * HEADS)
    (apart,) = describe({"l.0": layer})
    (sound,) = describe({"l.0": layer}, all_heads=2 * HEADS)

    assert (apart.opaque, sound.opaque) == (True, False)


@pytest.mark.parametrize(
    ("heads", "all_heads", "ranks", "opaque"),
    [
        (2, 8, 4, False),
        (4, 8, 4, True),  # K and V as heads
        (1, 2, 4, False),  # ranks that share a head
        (2, 2, 4, True),
        (1, 1, 4, False),  # MLA
        (1, 8, 4, True),  # all KV heads as one
    ],
)
def test_the_heads_of_a_rank_are_counted(heads, all_heads, ranks, opaque):
    """Engines of other sizes would take the wrong ones; K and V of two ranks, for example, instead of all of K."""
    (layer,) = laid_out("LBHNC", heads=heads)
    (region,) = describe({"l.0": layer}, all_heads=all_heads, ranks=ranks)

    assert region.opaque == opaque


def test_memory_has_nixls_name():
    """And a device number."""
    assert place_of({"l.0": torch.empty(1)}) == ("DRAM", 0)


def test_other_devices_are_refused():
    """By name."""
    with pytest.raises(UnsupportedCache, match="meta"):
        place_of({"l.0": torch.empty(1, device="meta")})
    with pytest.raises(UnsupportedCache, match="one device"):
        place_of({"l.0": torch.empty(1), "l.1": torch.empty(1, device="meta")})
