"""Every kind of cache that vLLM has: whatever its managers do, D computes each token from P's bytes.

vLLM's scheduler and managers run, with common beginnings, hits, preemptions and small steps; each layer reads what a
kernel of its kind reads. What moves is compared with what vLLM's NixlConnector would have moved, too.
PDRELAY_KIND_SEEDS is how many stories each kind has.
"""

import dataclasses
import itertools
import os
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        pytest.skip("models with a state are refused in this version", allow_module_level=True)
    import torch
    from vllm.v1 import kv_cache_interface

    from pdrelay_connector.shell import supported_caches
    from support import kind_mutants as mutants
    from support import kinds_table
    from support.cache_kinds import Pair, Shape, push_at_once, stories

from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.errors import IncompatiblePeer, UnsupportedCache
from support.kinds_table import KINDS
from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(30)
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
MOVABLE = [name for name, kind in KINDS.items() if not kind.is_packed]


@pytest.mark.parametrize("name", KINDS)
def test_every_token_is_computed_from_ps_bytes(name):
    """By pull and by push, and nothing that vLLM's own connector moves to where D reads is missing."""
    shape = KINDS[name].shape()
    counts = stories(shape, shape)

    assert counts["loads"] >= 4 * SEEDS
    assert counts["loaded"] >= counts["loads"] // 2
    assert counts["in-tree pairs"] >= 10 * SEEDS
    assert counts["in-tree takes other tokens"] == 0
    assert counts["hits"] >= (SEEDS if KINDS[name].caches else 0)


@pytest.mark.parametrize("name", KINDS)
def test_whatever_fails_no_other_bytes_are_read(name):
    """Connections break, engines stop past a lease, transfers hang and land late, clients leave."""
    shape = KINDS[name].shape(blocks=120)
    counts = stories(shape, shape, -(-SEEDS // 2), has_faults=True, is_equal=False)

    assert counts["faults"] >= SEEDS
    assert counts["loaded"] >= SEEDS


@pytest.mark.parametrize("name", MOVABLE)
def test_blocks_may_be_unequal(name):
    """In size, on either side; in vLLM's layout, where one layer's heads and tokens are in one piece in all of it."""
    kind = KINDS[name]
    sides = itertools.cycle([(4, 8), (8, 4)])
    for (one, other), layout in zip(sides, ("LBNHC", "BLHNC"), strict=False):
        is_ring = any(isinstance(spec, kv_cache_interface.CircularBufferSpec) for spec in kind.specs(4))
        p = kind.shape(one)
        d = kind.shape(other, layout="LBHNC" if is_ring else layout)
        assert stories(p, d, 1, is_equal=False)["loaded"] >= 2


@pytest.mark.parametrize("options", [{"kernel": 2}, *({"layout": layout} for layout in LAYOUTS)], ids=str)
@pytest.mark.parametrize("name", ["sliding window beside full attention", "state of Mamba 2"])
def test_blocks_may_be_in_any_layout(name, options):
    """P has another one than D, or its attention kernel has smaller blocks; and the other way round."""
    kind = KINDS[name]

    assert stories(kind.shape(**options), kind.shape(), 1)["loaded"] >= 2
    assert stories(kind.shape(), kind.shape(**options), 1)["loaded"] >= 2


WITHIN = {
    "a block of states has two of KV": Shape((kinds_table.state(8), kinds_table.full(4))),
    "half a block": Shape((kinds_table.state(8), kinds_table.full(8)), unit=4),
    "half a block, beside a window": Shape((kinds_table.state(8), kinds_table.full(8), kinds_table.window(8)), unit=4),
}


@pytest.mark.parametrize("shape", WITHIN.values(), ids=WITHIN)
def test_a_hit_may_end_within_a_block(shape):
    """VLLM copies the block before it goes on in it, or drops its tokens before a load."""
    counts = stories(shape, shape)

    assert counts["loaded"] >= 4 * SEEDS
    assert counts["hits"] >= SEEDS


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.is_packed])
def test_a_kernels_own_order_is_not_cut(name):
    """Values and then their scales: half of a block is not the half of a kernel's block of twice the size."""
    kind = KINDS[name]
    infos = [mutants.described(kind.shape(size)) for size in (4, 8)]

    with pytest.raises(IncompatiblePeer, match="blocks have"):
        check_shapes(*infos)


def test_rings_of_another_order_are_not_taken():
    """Their bytes are as many."""
    infos = [mutants.described(KINDS["circular buffer"].shape(layout=layout)) for layout in ("LBHNC", "LBNHC")]

    with pytest.raises(IncompatiblePeer, match="the heads and tokens of its state"):
        check_shapes(*infos)


def test_a_ring_in_several_pieces_is_refused_at_start():
    """Of all layers' first heads, and then of their second ones."""
    with pytest.raises(UnsupportedCache, match=r"layer l\.0\.1 keeps a ring with shape .* use a KV cache layout"):
        mutants.described(KINDS["circular buffer"].shape(layout="BHLNC"))


def test_each_class_of_vllm_is_served_or_refused():
    """A new one is refused by its name until it is in this table."""
    base = kv_cache_interface.KVCacheSpec
    classes = {each for each in vars(kv_cache_interface).values() if isinstance(each, type) and issubclass(each, base)}
    abstract = {base, kv_cache_interface.AttentionSpec}
    played = {type(spec) for kind in KINDS.values() for spec in kind.specs(4)}
    refused = {each for each in classes if each.__name__ in supported_caches._IMMOVABLE}
    rest = classes - abstract - {kv_cache_interface.UniformTypeKVCacheSpecs}

    assert played == set(supported_caches.SUPPORTED)
    assert rest == played | refused


def test_the_page_has_the_table():
    """PDRELAY_WRITE_MODELS=1 writes it."""
    if os.environ.get("PDRELAY_WRITE_MODELS"):
        kinds_table.write()

    assert kinds_table.written() == kinds_table.table()


@pytest.mark.slow  # what the tests above find: a quarter of a second each
@pytest.mark.parametrize(("mutate", "name"), mutants.MUTANTS, ids=lambda part: getattr(part, "__name__", part))
def test_a_broken_rule_is_noticed(monkeypatch, mutate, name):
    """Each is one rule of the layout turned off; its name says which."""
    mutate(monkeypatch)

    with pytest.raises((AssertionError, UnsupportedCache)):
        most_are_loaded(KINDS[name])


def test_what_a_step_computes_is_not_pushed_in_it():
    """Three prompts begin alike: vLLM lets one hit what another one computes in the same step."""
    pair = push_at_once(KINDS["full attention"].shape())

    assert len(pair.d.loaded) == 3


def most_are_loaded(kind):
    """Heads and tokens of full attention are in one order here, and in another there."""
    layout = "LBNHC" if len(kind.specs(4)) == 1 else "LBHNC"
    counts = stories(kind.shape(), kind.shape(layout=layout), 6)
    assert counts["loaded"] >= counts["loads"] // 2


def follow(p, d, mode):
    """A prompt is loaded, and D computes one that leaves it at a block's end, where a window begins with its middle."""
    pair = Pair(p, d)
    prompt = [number % 3 for number in range(68)]
    pair.ask("first", prompt, 1, mode)
    pair.run(5.0)
    pair.ask("second", [*prompt[:64], 2, 2, 0, 1], 1, "d")
    pair.run(5.0)

    assert pair.d.loaded == {"first"}
    assert pair.is_done
    assert len(pair.d.decodes._partial) == 0


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("name", ["sliding window", "sliding window beside full attention", "chunks"])
def test_a_block_that_is_loaded_in_part_is_no_hit(name, mode):
    """D's blocks are larger than P's, so the first one of a window has its end only. VLLM takes it for computed."""
    kind = KINDS[name]
    follow(kind.shape(4), kind.shape(8), mode)


@pytest.mark.parametrize(("mode", "size"), [("pull", 2), ("push", 2), ("push", 8)])
def test_a_block_that_is_loaded_in_part_is_no_hit_when_its_request_has_filled_it(mode, size):
    """The window is in one block with the prompt's end, and vLLM caches it once D has computed the rest."""
    pair = Pair(*(Shape((kinds_table.window(each, 5),), kernel=2) for each in (size, 8)))
    pair.ask("first", [number % 3 for number in range(63)], 4, mode)
    pair.run(5.0)

    assert pair.d.loaded == {"first"}
    assert pair.is_done


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("kernel", [0, 2])
def test_a_whole_block_is_loaded_where_sizes_are_equal(kernel, mode):
    """Also if the attention kernel has smaller ones."""
    shape = Shape((kinds_table.window(8),), kernel=kernel)
    follow(shape, shape, mode)


SHARERS = {
    "state": KINDS["state of Mamba 2"].specs,
    "state, and a window": KINDS["state, window and full attention"].specs,
    "another type": lambda size: (
        kinds_table.full(size),
        dataclasses.replace(kinds_table.window(size), dtype=torch.float32),
    ),
}


@pytest.mark.parametrize("sizes", [(8, 8), (4, 8), (8, 4)], ids=str)
@pytest.mark.parametrize("specs", SHARERS.values(), ids=SHARERS)
def test_nothing_is_left_in_a_loaded_block_of_another_groups_bytes(specs, sizes):
    """As NaN they would spoil whatever a kernel reads with them. The kernel's blocks are smaller than vLLM's."""
    p, d = (Shape(specs(size), kernel=2) for size in sizes)

    assert stories(p, d, 1, is_equal=False)["loaded"] >= 2
