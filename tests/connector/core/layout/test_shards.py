"""Which bytes go where between engines whose ranks divide a context among them, token by token against vLLM's rule."""

from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.core.layout.source_ranks import needed_ranks
from pdrelay_connector.core.layout.transfer_plan import TokenRange, pull_route, push_route, runs_per_block
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.errors import IncompatiblePeer
from support.searching import examples
from support.token_slots import slot_of

WIDTH, LAYERS = 16, 2


class Side(NamedTuple):
    """How one engine keeps the tokens of one KV cache group."""

    ranks: int = 1
    shards: int = 1
    interleave: int = 1
    rows: int = 1
    tokens: int = 4
    heads: int = 1  # of a layer, over all ranks
    swapped: bool = False  # tokens before heads

    @property
    def kept(self):
        return self.rows * self.tokens

    @property
    def size(self):
        return self.kept * self.shards

    def heads_of(self, rank):
        first = rank * self.heads // self.ranks
        return range(first, first + max(self.heads // self.ranks, 1))

    def slot(self, token, rank):
        return slot_of(token, self.kept, self.shards, rank % self.shards, self.interleave)


class Rank:
    """One rank's memory, by address."""

    def __init__(self, side, rank, address, blocks, fill):
        heads = len(side.heads_of(rank))
        rows = blocks * side.rows
        self.side = side
        self.rank = rank
        self.address = address
        shape = (LAYERS, rows, side.tokens, heads, WIDTH) if side.swapped else (LAYERS, rows, heads, side.tokens, WIDTH)
        self.bytes = np.full(int(np.prod(shape)), fill, np.uint8)
        view = self.bytes.reshape(shape)
        self.cache = view.swapaxes(2, 3) if side.swapped else view  # layer, row, head, token, byte
        strides = self.cache.strides
        self.info = RankInfo(
            rank, side.ranks, b"", "DRAM", 0,
            tuple(
                Region(
                    base=address + layer * strides[0], count=rows, heads=heads, tokens=side.tokens, width=WIDTH,
                    row_stride=strides[1], head_stride=strides[2], token_stride=strides[3], rows=side.rows,
                    all_heads=side.heads, layer=f"l.{layer}", shards=side.shards, interleave=side.interleave,
                )
                for layer in range(LAYERS)
            ),
        )  # fmt: skip

    def entry(self, table, start, token):
        """Return the entries of a token in all layers and heads, or None if another rank has it."""
        if (slot := self.side.slot(token, self.rank)) is None:
            return None
        number, place = slot
        block = table[number - start // self.side.size]
        return self.cache[:, block * self.side.rows + place // self.side.tokens, :, place % self.side.tokens]


def truth(token, heads):
    """What each layer has of a token and each of these heads."""
    seeds = [[(layer * 64 + head) * 1000 + token for head in heads] for layer in range(LAYERS)]
    return np.array(
        [[np.random.default_rng(seed).integers(0, 256, WIDTH) for seed in each] for each in seeds], np.uint8
    )


def covered(side, start, stop):
    """Return the tokens of the blocks that a stretch is in."""
    return range(start // side.size * side.size, -(-stop // side.size) * side.size)


def check_move(p, d, start, stop, *, pull, seed=0, whole=False):
    """Move a stretch of a prompt; each byte of D must be the right one, or what was there before."""
    rng = np.random.default_rng(seed)
    tables = [1 + rng.permutation(len(covered(side, start, stop)) // side.size + 2) for side in (p, d)]
    sources, targets = (
        [Rank(side, rank, 1 << (20 + rank), len(table) + 1, fill) for rank in range(side.ranks)]
        for side, table, fill in ((p, tables[0], 0), (d, tables[1], 0xA5))
    )
    for source in sources:
        for token in covered(p, start, stop):
            if (entry := source.entry(tables[0], start, token)) is not None:
                entry[...] = truth(token, p.heads_of(source.rank))
    ids = [table.tolist() for table in tables]
    token_range = TokenRange(0, start, stop, *(ids if pull else ids[::-1]), whole=whole)
    for target in targets:
        counts = np.zeros(target.bytes.shape, int)
        expected = target.bytes.copy()
        needed = {each.rank for each in needed_ranks(target.info, [source.info for source in sources])}
        for source in sources:
            ours, theirs = (target.info, source.info) if pull else (source.info, target.info)
            check_shapes(ours, theirs)
            assert bool(push_route(source.info, target.info)) == (source.rank in needed)
            spans = (pull_route if pull else push_route)(ours, theirs).spans([token_range])
            assert not len(spans) or source.rank in needed
            for there, here, length in spans.tolist():
                begin, end = (there, here) if pull else (here, there)
                begin, end = begin - source.address, end - target.address
                assert 0 <= begin < begin + length <= len(source.bytes)
                target.bytes[end : end + length] = source.bytes[begin : begin + length]
                counts[end : end + length] += 1
        assert counts.max() <= 1, "a byte was written twice"
        check_rank(target, expected, counts, tables[1], (start, stop), p, whole=whole)


def check_rank(target, expected, counts, table, stretch, p, *, whole):
    """What was to move is there; whatever else was written is what P has of that token."""
    start, stop = stretch
    seen = Rank(target.side, target.rank, 0, target.info.regions[0].blocks, 0)
    d = target.side
    seen.bytes[:] = counts
    known = covered(p, start, stop)
    for token in covered(d, start, stop):
        if (entry := target.entry(table, start, token)) is None:
            continue
        moved = seen.entry(table, start, token)
        assert moved.min() == moved.max()
        assert moved.all() or not (start <= token < stop or whole), f"token {token} did not move"
        if moved.any() and token in known:
            assert (entry == truth(token, d.heads_of(target.rank))).all(), f"token {token} has other bytes"
        moved[...] = 0
    assert not seen.bytes.any(), "bytes were written beside the blocks"
    assert (target.bytes[counts == 0] == expected[counts == 0]).all()


@st.composite
def pairs(draw):
    """Two engines that can exchange KV, of any numbers of ranks and shards."""
    heads = draw(st.sampled_from([1, 1, 2]))
    sides = []
    both = draw(st.sampled_from([1, 2, 4]))
    for _ in range(2):
        ranks = draw(st.sampled_from([each for each in (1, 2, 4, 8) if each >= heads or each == 1]))
        alike = max(ranks // heads, 1)
        shards = draw(st.sampled_from([each for each in (1, 2, 4, 8) if alike % each == 0]))
        interleave = both if shards > 1 else 1
        rows, tokens = draw(st.sampled_from([(1, 4), (1, 8), (2, 4), (4, 1), (2, 2), (4, 2)]))
        while rows * tokens % interleave:
            rows *= 2
        sides.append(Side(ranks, shards, interleave, rows, tokens, heads, draw(st.booleans())))
    return sides


@settings(max_examples=examples(120), deadline=None)
@given(pairs(), st.integers(0, 40), st.integers(1, 60), st.integers(0, 99), st.booleans(), st.booleans())
def test_every_token_is_put_where_vllm_looks_for_it(sides, start, length, seed, pull, whole):
    """Whatever the numbers of ranks, of parts, and of tokens in turn."""
    check_move(*sides, start, start + length, pull=pull, seed=seed, whole=whole)


@pytest.mark.parametrize("pull", [True, False])
@pytest.mark.parametrize("interleave", [1, 2, 4, 8])
@pytest.mark.parametrize(("p", "d"), [(p, d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8)])
def test_any_two_numbers_of_ranks_that_divide_each_other_can_meet(p, d, interleave, pull):
    """Latent vectors, of which vLLM's NixlConnector moves the same."""
    sides = [Side(ranks, ranks, interleave if ranks > 1 else 1, tokens=8) for ranks in (p, d)]

    check_move(*sides, 5, 61, pull=pull)


@pytest.mark.parametrize("interleave", [1, 4])
def test_equal_engines_move_whole_blocks_rank_by_rank(interleave):
    """Then no more descriptors are needed than without context parallelism."""
    side = Side(4, 4, interleave)
    info = Rank(side, 3, 4096, 9, 0).info

    assert [each.rank for each in needed_ranks(info, [Rank(side, rank, 4096, 9, 0).info for rank in range(4)])] == [3]
    assert runs_per_block(info) == LAYERS


def shaped(rank=0, **changed):
    """Return what an engine's rank says of itself; ``changed`` is of the side, or else of its regions."""
    fields = {key: changed.pop(key) for key in list(changed) if key not in Side._fields}
    info = Rank(Side(**changed), rank, 4096, 9, 0).info
    return msgspec.structs.replace(
        info, regions=tuple(msgspec.structs.replace(region, **fields) for region in info.regions)
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (shaped(ranks=2, shards=2), shaped(ranks=3, shards=3, tokens=8), "3 of its ranks divide a context"),
        (shaped(ranks=2, shards=2), shaped(ranks=3, shards=3), "its blocks have 12 tokens, ours 8"),
        (shaped(ranks=2, shards=2, interleave=2), shaped(ranks=2, shards=2), "keep 1 tokens in turn, ours 2"),
        (shaped(ranks=2, shards=2), shaped(ranks=2, shards=2, interleave=3), "its ranks keep 3 tokens in turn, and 4"),
        (shaped(ranks=4, heads=2), shaped(ranks=4, heads=2, shards=4), "its 4 ranks with parts of one context"),
        (shaped(ranks=2, opaque=True), shaped(ranks=2, shards=2, opaque=True), "less than a kernel's block in turn"),
        (shaped(ranks=2, opaque=True, tokens=8), shaped(ranks=2, shards=2, opaque=True), "its blocks have 4 tokens"),
        (shaped(ranks=2, shards=2, covers=2), shaped(ranks=2, covers=2), "with compressed vectors they must be equal"),
    ],
)
def test_engines_that_divide_contexts_otherwise_are_refused(ours, theirs, says):
    """Each would give a rank other tokens than its kernel looks for."""
    with pytest.raises(IncompatiblePeer, match=says):
        check_shapes(ours, theirs)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (4, 2), (2, 2)])
def test_whole_blocks_of_an_unknown_order_may_go_to_other_ranks(ours, theirs):
    """Where a rank keeps no less of them in turn, or where both divide them alike."""
    interleave = 1 if ours == theirs else 4
    check_shapes(
        *(
            shaped(ranks=ranks, shards=ranks, interleave=interleave if ranks > 1 else 1, opaque=True)
            for ranks in (ours, theirs)
        )
    )


def test_a_state_goes_with_equal_numbers_only():
    """VLLM's NixlConnector says so, too."""
    state = Region(4096, 9, 1, 1, 64, 64, 0, 0, group=1, all_heads=2, state=True, layer="s")
    ours, theirs, other = (
        msgspec.structs.replace(info, regions=(*info.regions, state))
        for info in (shaped(ranks=2, shards=2), shaped(ranks=2, shards=2), shaped(ranks=2, shards=1))
    )

    check_shapes(ours, theirs)
    with pytest.raises(IncompatiblePeer, match="with a model that keeps a state they must be equal"):
        check_shapes(ours, other)


def test_ranks_that_contradict_each_other_are_refused():
    """Some tokens would be on none of them."""
    theirs = [shaped(0, ranks=2, shards=2), shaped(1, ranks=2)]

    with pytest.raises(IncompatiblePeer, match="do not agree how they divide the tokens of l"):
        needed_ranks(shaped(), theirs)
