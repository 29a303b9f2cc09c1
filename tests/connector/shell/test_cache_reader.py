"""Checksums of a cache's own bytes: equal where blocks hold the same, whatever lies around them, and only there."""

import itertools
import logging
import warnings
from zlib import crc32

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    import torch

    from pdrelay_connector.shell.cache_reader import TensorReader, reader_of
    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches
    from pdrelay_connector.shell.engine_config import EngineConfig

from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.errors import UnsupportedCache
from support.token_slots import slot_of

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
HEADS = 2
TOKENS = 4
CONTENT = 8
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC")
KERNELS = [KernelLayout.ENTRIES, KernelLayout.TRANSPOSED]


@pytest.fixture
def said():
    """Return the warnings of the connector."""
    lines = []
    log = logging.getLogger("vllm.pdrelay")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


def made(
    layout="LBHNC",
    *,
    blocks=5,
    seed=0,
    kernel=KernelLayout.ENTRIES,
    rows=1,
    covers=1,
    key=(0, 1),
    device="cpu",
    shards=1,
    interleave=1,
):
    """Return a cache of two layers as vLLM hands it over, and its reader.

    ``rows`` of the kernel make a block, and an entry ``covers`` so many tokens; ``shards`` ranks divide a context.
    """
    sizes = {"L": 2, "B": blocks * rows, "H": HEADS, "N": TOKENS, "C": CONTENT}
    memory = torch.rand([sizes[axis] for axis in layout], generator=torch.Generator().manual_seed(seed)).to(device)
    layers = memory.permute([layout.index(axis) for axis in "LBHNC"])
    caches = {f"l.{number}": layer for number, layer in enumerate(layers)}
    config = EngineConfig(
        EngineId("e"), Address("127.0.0.1", 1), (CacheGroup(TOKENS * rows * covers * shards, shards=shards),),
        dict.fromkeys(caches, 0), blocks, HEADS, 1, is_producer=True, is_consumer=True,
        tokens_per_entry=dict.fromkeys(caches, covers), interleave=interleave,
    )  # fmt: skip
    return layers, TensorReader(caches, describe_caches(caches, config, blocks, kernel), key)


def test_the_tokens_of_a_compressed_cache_are_in_fewer_rows():
    """The blocks behind it are not read: those of another request, or of no tensor."""
    there, p = made(rows=2, covers=2, blocks=8)
    here, d = made(rows=2, covers=2, blocks=8, seed=1)
    here[:, 6:8] = there[:, 6:8]

    assert d.block_size(0) == 4 * TOKENS
    assert p.checksum(0, 3, 0, 4 * TOKENS) == d.checksum(0, 3, 0, 4 * TOKENS)
    assert p.checksum(0, 7, 2 * TOKENS, 4 * TOKENS) != d.checksum(0, 7, 2 * TOKENS, 4 * TOKENS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_that_was_copied_has_the_same_checksum(layout, kernel):
    """In a cache of another size (if heads are not outside of blocks), at another place, among other blocks."""
    there, p = made(layout, kernel=kernel, blocks=8)
    here, d = made(layout, kernel=kernel, blocks=8 if layout == "LHBNC" else 9, seed=1)
    assert p.shape == d.shape
    assert p.checksum(0, 2, 0, TOKENS) != d.checksum(0, 7, 0, TOKENS)
    here[:, 7] = there[:, 2]

    assert p.checksum(0, 2, 0, TOKENS) == d.checksum(0, 7, 0, TOKENS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_a_block_counts_and_no_other(layout, kernel):
    """One that differs is a wrong block; one of its neighbours is not."""
    layers, reader = made(layout, blocks=3, kernel=kernel)
    before = reader.checksum(0, 1, 0, TOKENS)
    for place in torch.cartesian_prod(*map(torch.arange, layers.shape)).tolist():
        layer, block, *rest = place
        kept = layers[tuple(place)].clone()
        layers[tuple(place)] = -1.0
        changed = reader.checksum(0, 1, 0, TOKENS) != before
        layers[tuple(place)] = kept

        assert changed == (block == 1), (layer, block, *rest)


def test_of_a_blocks_beginning_the_kernels_rows_count_that_it_reaches_into():
    """A transfer of two engines of one shape moves whole rows, too."""
    layers, reader = made(rows=2)
    before = [reader.checksum(0, 2, *tokens) for tokens in ((0, 3), (0, 5), (5, 8))]
    layers[0, 5, 0, 3, 0] = -1.0  # the second row of block 2
    after = [reader.checksum(0, 2, *tokens) for tokens in ((0, 3), (0, 5), (5, 8))]

    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False]


@pytest.mark.parametrize("interleave", [1, 2, 4, 8])
def test_of_a_divided_context_the_rows_of_this_ranks_tokens_count(interleave):
    """Where rows are of 4 tokens, and each of 2 ranks keeps 8 of the 16 tokens of a block."""
    for rank, (start, stop) in itertools.product((0, 1), itertools.combinations(range(17), 2)):
        layers, reader = made(rows=2, key=(rank, 0, 2, 1), shards=2, interleave=interleave)
        before = reader.checksum(0, 2, start, stop)
        slots = [slot_of(token, 8, 2, rank, interleave) for token in range(start, stop)]
        rows = {slot[1] // TOKENS for slot in slots if slot is not None}
        for row in (0, 1):
            layers[1, 4 + row, 1, 0, 0] += 1.0
            assert (reader.checksum(0, 2, start, stop) != before) == (row in rows)
            layers[1, 4 + row, 1, 0, 0] -= 1.0


def test_a_dense_block_is_read_in_the_order_of_its_layers():
    """The checksum is that of the bytes, one layer after the other: engines of later versions can agree."""
    layers, reader = made()
    whole = b"".join(layer[3].numpy().tobytes() for layer in layers)

    assert reader.checksum(0, 3, 0, TOKENS) == crc32(whole)


def test_other_layouts_ranks_and_block_sizes_are_other_shapes():
    """Of which no two blocks are compared."""
    kinds = [{}, {"layout": "LBNHC"}, {"kernel": KernelLayout.TRANSPOSED}, {"rows": 2}, {"key": (1, 2)}]
    kinds += [{"shards": 2}, {"shards": 2, "interleave": 2}]
    shapes = {made(**kind)[1].shape for kind in kinds}

    assert len(shapes) == len(kinds)


def test_a_group_of_other_stages_has_no_blocks_here():
    """A pipeline stage may lack one."""
    assert made()[1].block_size(0) == TOKENS
    assert made()[1].block_size(1) == 0


def test_a_block_that_torch_does_not_copy_has_no_checksum(said):
    """As on a device that is out of memory. The engine goes on, and says so once."""
    _, reader = made(device="meta")

    assert [reader.checksum(0, block, 0, TOKENS) for block in (1, 2)] == [None, None]
    (line,) = said
    assert "a block's checksum cannot be taken" in line


def test_a_cache_that_cannot_be_described_has_no_reader(said):
    """With host staging such an engine works: only the copies in host memory are described to others."""

    def describe():
        raise UnsupportedCache("layer l.0 has shape (1, 2)")

    assert reader_of({}, describe, (0, 1)) is None
    (line,) = said
    assert line.endswith("cannot be taken: layer l.0 has shape (1, 2)")
