"""Which bytes go where between engines of any two shapes, against a reference that goes token by token."""

from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.core.layout.source_ranks import heads_of, needed_ranks
from pdrelay_connector.core.layout.transfer_plan import TokenRange, merge, pull_route, push_route, runs_per_block
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.errors import IncompatiblePeer, ProtocolViolation
from support.searching import examples

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SIZES = range(1, 9)  # tensor parallel


def fits(heads, ranks):
    return heads % ranks == 0 or ranks % heads == 0


MEETINGS = [(p, d, heads) for p in SIZES for d in SIZES for heads in SIZES if fits(heads, p) and fits(heads, d)]
CUTS = [  # rows and tokens of a row, here and there
    (rows, tokens, rows_there, tokens_there)
    for rows in (1, 2, 3, 4)
    for tokens in (1, 2, 4)
    for rows_there in (1, 2, 3, 4)
    for tokens_there in (1, 2, 3, 4)
    if max(tokens, tokens_there) % min(tokens, tokens_there) == 0
    and max(rows * tokens, rows_there * tokens_there)
    in {n * min(rows * tokens, rows_there * tokens_there) for n in range(1, 5)}
]


class Shape(NamedTuple):
    """How one engine keeps one group. The layout may say where the parts of an entry are, too: ``LBHPNC``."""

    layout: str
    rows: int
    tokens: int


class Group(NamedTuple):
    """What both engines agree on."""

    layers: int
    heads: int
    width: int
    start: int
    stop: int
    parts: int = 1  # of ``width`` bytes each


class Rank:
    """One rank's memory, and what it says of it: strides as numpy counts them."""

    def __init__(self, rng, address, rank, ranks, groups, shapes, blocks):
        regions, pieces = [], []
        for number, (group, shape) in enumerate(zip(groups, shapes, strict=True)):
            first, last = heads_of(group.heads, ranks, rank)
            sizes = {"L": group.layers, "B": blocks * shape.rows, "H": last - first}
            sizes |= {"N": shape.tokens, "P": group.parts, "C": group.width}
            layout = shape.layout if "P" in shape.layout else shape.layout.replace("C", "PC")
            sides, axes = [sizes[axis] for axis in layout], [layout.index(axis) for axis in "LBHNPC"]
            start = address + sum(int(np.prod(others)) for others, _ in pieces)
            strides = np.empty(sides, np.uint8).transpose(axes).strides
            pieces.append((sides, axes))
            regions += [
                Region(
                    base=start + layer * strides[0],
                    count=sizes["B"],
                    heads=sizes["H"],
                    tokens=shape.tokens,
                    width=group.width,
                    row_stride=strides[1],
                    head_stride=strides[2],
                    token_stride=strides[3],
                    rows=shape.rows,
                    group=number,
                    all_heads=group.heads,
                    parts=group.parts,
                    part_stride=strides[4],
                )
                for layer in range(group.layers)
            ]
        self.address = address
        self.bytes = rng.integers(0, 256, sum(int(np.prod(sides)) for sides, _ in pieces), dtype=np.uint8)
        self.pieces = pieces
        self.info = RankInfo(rank, ranks, b"", "DRAM", 0, tuple(regions))

    def caches(self, flat):
        """Return ``flat``, as long as the memory, as one array for each group: layer, row, head, token, part, byte."""
        ends = np.cumsum([int(np.prod(sides)) for sides, _ in self.pieces])
        cut = np.split(flat, ends[:-1])
        return [piece.reshape(sides).transpose(axes) for piece, (sides, axes) in zip(cut, self.pieces, strict=True)]


def engine(rng, ranks, groups, shapes, blocks):
    return [Rank(rng, int(rng.integers(1, 1 << 40)), rank, ranks, groups, shapes, blocks) for rank in range(ranks)]


def places(group, shape, table, positions):
    """Return for every token position its row, and its number within it."""
    size = shape.rows * shape.tokens
    for position in positions:
        block = table[position // size - group.start // size]
        yield position, block * shape.rows + position % size // shape.tokens, position % shape.tokens


def covered(group, size):
    """Return the positions in the blocks that a stretch needs on one side."""
    return range(group.start // size * size, -(-group.stop // size) * size)


def tables(rng, groups, shapes, contiguous):
    """Draw blocks for every group from one pool in which 0 is nobody's; return them, and the size of the pool."""
    needs = [
        len(covered(group, s.rows * s.tokens)) // (s.rows * s.tokens) for group, s in zip(groups, shapes, strict=True)
    ]
    blocks = sum(needs) + 3
    pool = np.arange(1, blocks) if contiguous else rng.permutation(np.arange(1, blocks))
    return [part.tolist() for part in np.split(pool, np.cumsum(needs))[: len(needs)]], blocks


class World(NamedTuple):
    """A prefill engine with a request's KV, and a decode engine without it."""

    groups: list
    sources: list
    targets: list
    source_shapes: list
    target_shapes: list
    source_tables: list
    target_tables: list
    truth: list  # for each group: layer, head, position, part, byte
    whole: bool = False  # nothing is left in the target's blocks of what was there before

    def token_ranges(self, *, pull):
        tables = zip(self.source_tables, self.target_tables, strict=True)
        pairs = [(source, target) if pull else (target, source) for source, target in tables]
        return [TokenRange(n, g.start, g.stop, *pairs[n], whole=self.whole) for n, g in enumerate(self.groups)]


def world(seed, ranks, ranks_there, groups, shapes, shapes_there, contiguous=False):
    rng = np.random.default_rng(seed)
    source_tables, source_blocks = tables(rng, groups, shapes, contiguous)
    target_tables, target_blocks = tables(rng, groups, shapes_there, contiguous)
    sources = engine(rng, ranks, groups, shapes, source_blocks)
    targets = engine(rng, ranks_there, groups, shapes_there, target_blocks)
    sides = [(g.layers, g.heads, g.stop + 64, g.parts, g.width) for g in groups]
    truth = [rng.integers(0, 256, each, dtype=np.uint8) for each in sides]
    for source in sources:
        for number, cache in enumerate(source.caches(source.bytes)):
            group, shape = groups[number], shapes[number]
            first, last = heads_of(group.heads, ranks, source.info.rank)
            for position, row, token in places(
                group, shape, source_tables[number], covered(group, shape.rows * shape.tokens)
            ):
                cache[:, row, :, token] = truth[number][:, first:last, position]
    return World(groups, sources, targets, shapes, shapes_there, source_tables, target_tables, truth)


def check_runs(spans):
    """Check that the runs are in order, and that no two of them could have been one."""
    assert spans.dtype == np.int64
    assert spans.ndim == 2
    assert spans.shape[1] == 3
    runs = [tuple(run) for run in spans.tolist()]
    assert runs == sorted(runs)
    starts = {(there, here) for there, here, _ in runs}
    assert not any((there + length, here + length) in starts for there, here, length in runs)


def copy(spans, source, target, counts):
    """Move the runs, given as addresses in the source, addresses in the target, bytes."""
    for start, into, length in spans.tolist():
        begin, end = start - source.address, into - target.address
        assert 0 <= begin < begin + length <= len(source.bytes)
        assert 0 <= end < end + length <= len(target.bytes)
        target.bytes[end : end + length] = source.bytes[begin : begin + length]
        counts[end : end + length] += 1


def expected(world, target, before):
    """Return what a target's memory should hold, and how often each byte should have been written."""
    bytes_ = before.copy()
    counts = np.zeros(before.shape, np.int64)
    for number, (cache, count) in enumerate(zip(target.caches(bytes_), target.caches(counts), strict=True)):
        group, shape = world.groups[number], world.target_shapes[number]
        unit = min(shape.tokens, world.source_shapes[number].tokens)
        first, last = heads_of(group.heads, target.info.ranks, target.info.rank)
        positions = covered(group, shape.rows * shape.tokens if world.whole else unit)
        source = covered(group, world.source_shapes[number].rows * world.source_shapes[number].tokens)
        for position, row, token in places(
            group, shape, world.target_tables[number], positions if group.start < group.stop else ()
        ):
            nearest = min(max(position // unit * unit, source.start), source.stop - unit) + position % unit
            cache[:, row, :, token] = world.truth[number][:, first:last, nearest]
            count[:, row, :, token] += 1
    return bytes_, counts


def check_world(world, *, pull):
    """Move everything, and check every byte of every rank of the decode engine."""
    token_ranges = world.token_ranges(pull=pull)
    reached = set()
    for target in world.targets:
        before = target.bytes.copy()
        counts = np.zeros(target.bytes.shape, np.int64)
        wanted, times = expected(world, target, before)
        for source in world.sources:
            ours, theirs = (target.info, source.info) if pull else (source.info, target.info)
            check_shapes(ours, theirs)
            spans = (pull_route if pull else push_route)(ours, theirs).spans(token_ranges)
            if not world.whole:  # a row that moves more than once may adjoin several
                check_runs(spans)
            copy(spans if pull else spans[:, [1, 0, 2]], source, target, counts)
            if len(spans):
                reached.add((source.info.rank, target.info.rank))
        assert (counts == times).all()
        assert (target.bytes == wanted).all()
    if any(group.start < group.stop for group in world.groups):
        check_reached(world, reached)


def check_reached(world, reached):
    """Check that engines know beforehand whom they meet: with every group moved, just those that moved something."""
    sources, targets = ([side.info for side in sides] for sides in (world.sources, world.targets))
    needed = {(source.rank, target.rank) for target in targets for source in needed_ranks(target, sources)}
    served = {(source.rank, target.rank) for source in sources for target in targets if push_route(source, target)}
    assert needed == served
    assert reached <= needed
    if all(group.start < group.stop for group in world.groups):
        assert reached == needed


def apart(layout, place):
    """Return a layout in which the parts of an entry are anywhere but within each other."""
    return layout[:place] + "P" + layout[place:]


@st.composite
def worlds(draw):
    ranks, ranks_there, heads = draw(st.sampled_from(MEETINGS))
    others = [h for p, d, h in MEETINGS if (p, d) == (ranks, ranks_there)]
    layouts = st.builds(apart, st.sampled_from(LAYOUTS), st.integers(0, 4))
    groups = []
    shapes = []
    shapes_there = []
    for number in range(draw(st.integers(1, 3))):
        rows, tokens, rows_there, tokens_there = draw(st.sampled_from(CUTS))
        shapes.append(Shape(draw(layouts), rows, tokens))
        shapes_there.append(Shape(draw(layouts), rows_there, tokens_there))
        start = draw(st.integers(0, 20))
        stop = start + draw(st.integers(0, 24))
        all_heads = draw(st.sampled_from(others)) if number else heads
        width, parts = draw(st.sampled_from([(16, 1), (24, 1), (16, 2), (24, 3)]))
        groups.append(Group(draw(st.integers(1, 3)), all_heads, width, start, stop, parts))
    seed, contiguous = draw(st.integers(0, 1 << 32)), draw(st.booleans())
    whole = draw(st.booleans())
    return world(seed, ranks, ranks_there, groups, shapes, shapes_there, contiguous)._replace(whole=whole)


@settings(max_examples=examples(150))
@given(worlds())
def test_pull_puts_every_token_in_its_place_once_and_nothing_elsewhere(world):
    """One byte off is a wrong answer for this request, or for its neighbour."""
    check_world(world, pull=True)


@settings(max_examples=examples(150))
@given(worlds())
def test_push_puts_every_token_in_its_place_once_and_nothing_elsewhere(world):
    """The same arithmetic, seen from the other side."""
    check_world(world, pull=False)


@pytest.mark.parametrize("pull", [True, False])
@pytest.mark.parametrize("ranks", SIZES)
def test_any_two_tensor_parallel_sizes_that_share_out_the_heads_can_meet(ranks, pull):
    """Up to 8 against 8, with heads divided, kept several times, or one for all as in MLA."""
    groups = [Group(2, heads, 16, 3, 13) for heads in SIZES]
    for ranks_there in SIZES:
        shared = [group for group in groups if (ranks, ranks_there, group.heads) in MEETINGS]
        shapes, shapes_there = [Shape("LBHNC", 1, 4)] * len(shared), [Shape("BLNHC", 2, 4)] * len(shared)

        check_world(world(ranks_there, ranks, ranks_there, shared, shapes, shapes_there), pull=pull)


def shaped(layout, *, layers=3, tokens=16, blocks=9, rank=0, ranks=1, width=32, parts=1, **changed):
    """Return a rank of 4 KV heads, as numpy would stride it."""
    group = Group(layers, 4, width, 0, 0, parts)
    info = Rank(np.random.default_rng(0), 4096, rank, ranks, [group], [Shape(layout, 1, tokens)], blocks).info
    return msgspec.structs.replace(
        info, regions=tuple(msgspec.structs.replace(region, **changed) for region in info.regions)
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=20), st.randoms())
def test_merging_moves_the_same_bytes_to_the_same_places(pieces, rng):
    """Whatever the order; and leaves nothing to merge."""
    runs = []
    there = 0
    here = 10_000
    for gap, length, moved in pieces:
        there, here = there + gap, here + (1000 if moved else gap)
        runs.append((there, here, length))
        there, here = there + length, here + length
    rng.shuffle(runs)
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    merged = merge(table)

    def moves(table):
        return Counter((there + n, here + n) for there, here, length in table.tolist() for n in range(length))

    check_runs(merged)
    assert moves(merged) == moves(table)


def test_nothing_missing_is_nothing_to_move():
    """An empty stretch needs no blocks; no stretch is an empty table, too."""
    route = pull_route(shaped("LBHNC"), shaped("LBHNC"))

    assert route.spans([]).shape == (0, 3)
    assert route.spans([TokenRange(0, 16, 16, [], [])]).shape == (0, 3)
    assert route.spans([]).dtype == np.int64


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([1], "tokens 0 to 20 of group 0 need 2 of {} blocks of 16 tokens; 1 named"),
        ([], "tokens 0 to 20 of group 0 need 2 of {} blocks of 16 tokens; 0 named"),
        ([1, 9], "block 9, for tokens 0 to 20 of group 0, is not one of {} 9 blocks"),
        ([-1, 1], "block -1, for tokens 0 to 20 of group 0, is not one of {} 9 blocks"),
        ([1, 2**62], f"block {2**62}, for tokens 0 to 20 of group 0, is not one of {{}} 9 blocks"),
        ([1, 2**64], "a block for tokens 0 to 20 of group 0 is beyond {} 9 blocks"),
        ([1, 0], "tokens 0 to 20 of group 0 are not held: one of {} blocks is 0, the null block"),
    ],
)
def test_blocks_that_are_not_there_or_not_held_are_refused(blocks, message):
    """NIXL would read beyond the cache, or what belongs to nobody."""
    route = pull_route(shaped("LBHNC"), shaped("LBHNC"))

    with pytest.raises(ProtocolViolation) as theirs:
        route.spans([TokenRange(0, 0, 20, blocks, [1, 2])])
    with pytest.raises(ProtocolViolation) as ours:
        route.spans([TokenRange(0, 0, 20, [1, 2], blocks)])
    assert str(theirs.value) == message.format("the peer's")
    assert str(ours.value) == message.format("our")


def test_blocks_behind_the_stretch_are_not_looked_at():
    """A list may reach further than what is missing."""
    spans = pull_route(shaped("LBHNC"), shaped("LBHNC")).spans([TokenRange(0, 0, 16, [1, 0], [1, 99])])

    assert len(spans) == 3


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (8, 4)])
def test_tokens_out_of_order_are_refused(start, stop):
    """Nothing sensible can be moved."""
    with pytest.raises(ProtocolViolation, match=f"tokens {start} to {stop} of a prompt; they must be in order"):
        pull_route(shaped("LBHNC"), shaped("LBHNC")).spans([TokenRange(0, start, stop, [1], [1])])


def test_a_group_that_the_cache_does_not_have_is_refused():
    """Rather than leaving its layers unread."""
    with pytest.raises(ProtocolViolation, match=r"group 2 of a cache that has the groups \[0\]"):
        pull_route(shaped("LBHNC"), shaped("LBHNC")).spans([TokenRange(2, 0, 4, [1], [1])])


def test_a_huge_stretch_costs_nothing_before_its_blocks_are_counted():
    """A peer's numbers are only as good as the blocks it names."""
    with pytest.raises(ProtocolViolation, match="need 4398046511104 of the peer's blocks"):
        pull_route(shaped("LBHNC"), shaped("LBHNC")).spans([TokenRange(0, 0, 1 << 46, [1], [1])])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parts": 2}, "region 0: it has entries in 2 parts, ours 1; they must be equal"),
        ({"parts": 2, "width": 16}, "region 0: it has entries in 2 parts, ours 1; they must be equal"),
        ({"width": 48}, "region 0: it has entries of 48 bytes, ours 32; they must be equal"),
        ({"all_heads": 8}, "region 0: it has 8 KV heads on all ranks, ours 4; they must be equal"),
        ({"group": 1}, "region 0: it has KV cache group 1, ours 0; they must be equal"),
        ({"covers": 2}, "region 0: it has entries of 2 tokens, ours 1; they must be equal"),
        ({"tokens": 24}, "region 0: its blocks have 24 tokens, ours 16; one must be a multiple of the other"),
        ({"rows": 4, "tokens": 12}, "its kernel's blocks have 12 tokens, ours 16; one must be a multiple of the other"),
        ({"heads": 2}, "region 0: its rank 0 of 1 keeps 2 KV heads, not 4"),
        ({"base": 2**63 - 9 * 4 * 16 * 32}, f"its memory would end at address {2**63}; the highest is {2**63 - 1}"),
        ({"row_stride": 2**61}, "its memory would end at address"),
        ({"token_stride": 2**63}, "its memory would end at address"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_refused_with_both_values(changed, message):
    """Before a byte moves; an operator reads it."""
    with pytest.raises(IncompatiblePeer) as refused:
        check_shapes(shaped("LBHNC"), shaped("LBHNC", **changed))

    assert message in str(refused.value)


KEPT = "they must be equal, because the order within its attention kernel's blocks is unknown"
OPAQUE_FAULTS = [
    ({"tokens": 32}, "its blocks have 32 tokens, ours 16"),
    ({"rows": 2, "tokens": 8}, "its kernel's blocks have 8 tokens, ours 16"),
    ({"rank": 0, "ranks": 2}, "it has 2 tensor-parallel ranks, ours 1"),
    ({"head_stride": 32}, "its heads are 32 bytes apart, ours 512"),
    ({"token_stride": 128}, "its tokens are 128 bytes apart, ours 32"),
]


@pytest.mark.parametrize("opaque", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("changed", "message"), OPAQUE_FAULTS)
def test_rows_that_only_a_kernel_understands_move_between_twins_alone(changed, message, opaque):
    """Whose they are makes no difference: nothing can be cut out of them, nor put together."""
    ours, theirs = shaped("LBHNC", opaque=opaque[0]), shaped("LBHNC", opaque=opaque[1], **changed)
    with pytest.raises(IncompatiblePeer) as refused:
        check_shapes(ours, theirs)

    assert str(refused.value) == f"region 0: {message}; {KEPT}"


@pytest.mark.parametrize(("changed", "message"), OPAQUE_FAULTS)
def test_what_is_refused_of_such_rows_is_welcome_of_others(changed, message):
    """Else the rule would be one for all."""
    check_shapes(shaped("LBHNC"), shaped("LBHNC", **changed))


def test_rows_that_all_ranks_have_alike_go_to_any_number_of_ranks():
    """MLA's, whatever its kernel does with them: each rank has the one head of the layer."""
    ours, theirs = (
        shaped("LBHNC", heads=1, all_heads=1, opaque=True, rank=rank, ranks=ranks) for rank, ranks in ((0, 1), (1, 2))
    )
    check_shapes(ours, theirs)
    check_shapes(theirs, ours)

    assert len(pull_route(theirs, ours).spans([TokenRange(0, 0, 20, [7, 3], [8, 1])])) == 3 * 2


@pytest.mark.parametrize("covers", [2, 4])
@pytest.mark.parametrize(("rows", "rows_there"), [(1, 1), (1, 2), (4, 2)])
def test_an_entry_of_several_tokens_moves_as_one_of_each(covers, rows, rows_there):
    """From the first entry of which a token is lacking to the last."""
    sizes = [{"rows": each, "tokens": 16 // each, "blocks": 20 * each} for each in (rows, rows_there)]
    plain, compressed = (pull_route(*(shaped("LBHNC", **size, covers=each) for size in sizes)) for each in (1, covers))
    blocks = list(range(1, 9)), list(range(9, 17))
    for start, stop in ((0, 16 * covers), (3, 5), (covers, 50), (17, 17 + covers), (30, 31)):
        first = start // (16 * covers)
        ranges = [
            TokenRange(0, begin, end, blocks[0][first:], blocks[1][first:])
            for begin, end in ((start // covers, -(-stop // covers)), (start, stop))
        ]
        assert np.array_equal(plain.spans([ranges[0]]), compressed.spans([ranges[1]]))


def test_such_rows_may_be_anywhere_and_any_number():
    """Rows are moved whole, each in one piece if it is one."""
    ours, theirs = shaped("LBHNC", opaque=True), shaped("BLHNC", opaque=True, blocks=40)
    check_shapes(ours, theirs)
    spans = pull_route(ours, theirs).spans([TokenRange(0, 3, 20, [7, 30], [8, 1])])

    assert len(spans) == 3 * 2
    assert (spans[:, 2] == 4 * 16 * 32).all()


@pytest.mark.parametrize("ours", [True, False])
def test_parts_too_are_counted_to_find_the_end_of_a_memory(ours):
    """The last part of the last entry is its last byte."""
    size = 9 * 4 * 16 * 32
    far = shaped("LBHPNC", layers=1, width=2, parts=16, base=2**63 - size)
    near = shaped("LBHPNC", layers=1, width=2, parts=16, base=2**63 - 1 - size)
    check_shapes(near, near)
    with pytest.raises(IncompatiblePeer, match=f"{'our' if ours else 'its'} memory would end at address {2**63}; the"):
        check_shapes(*((far, near) if ours else (near, far)))


def test_short_rows_of_parts_are_refused():
    """4 tokens of 2 bytes are a piece, wherever the rest of the row is."""
    short, long = (shaped("LBHPNC", tokens=tokens, width=2, parts=16) for tokens in (4, 8))
    check_shapes(short, short)
    with pytest.raises(IncompatiblePeer, match="KV would move in runs of 8 bytes; the least is 16"):
        check_shapes(short, long)


def test_memory_may_end_at_the_highest_address():
    """Arithmetic in signed 64 bits has room for just that."""
    highest = shaped("LBHNC", base=2**63 - 1 - 9 * 4 * 16 * 32)
    check_shapes(highest, highest)
    spans = pull_route(highest, shaped("LBHNC")).spans([TokenRange(0, 0, 16, [1], [8])])

    assert (spans[:, 1] + spans[:, 2] == 2**63 - 1).all()


def test_a_differing_number_of_regions_is_refused_with_both_numbers():
    """Otherwise a layer would stay unread."""
    with pytest.raises(IncompatiblePeer, match="its cache has 2 regions of all layers, ours has 3; they must be equal"):
        check_shapes(shaped("LBHNC"), shaped("LBHNC", layers=2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_one_descriptor_where_its_layers_lie_side_by_side(layout):
    """Else one for each layer, or, with the heads outside of the blocks, for each layer's heads."""
    own = shaped(layout)
    layers = len(own.regions)
    heads = own.regions[0].heads

    assert runs_per_block(own) == (1 if layout[0] == "B" else layers * (heads if layout == "LHBNC" else 1))


def test_layouts_that_would_move_a_few_bytes_each_are_refused():
    """Tokens of 8 bytes: as twins they move in one piece, permuted each alone."""
    check_shapes(narrow("LBHNC"), narrow("LBHNC"))
    with pytest.raises(IncompatiblePeer, match="runs of 8 bytes; the least is 16"):
        check_shapes(narrow("LBHNC"), narrow("LBNHC"))


def narrow(layout):
    shapes = [Shape(layout, 1, 16)]
    return Rank(np.random.default_rng(0), 0, 0, 1, [Group(1, 4, 8, 0, 0)], shapes, 4).info
