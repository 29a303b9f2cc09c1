"""How a load is cut for staging buffers: what is cut must be the whole again, and fit."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.layout.parts import SHARE, block_sizes, cut, most_blocks, steps
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import MAX_PART, RankInfo, Region
from support.engines import changed, rank_info


class Side(NamedTuple):
    """One engine: whether it stages, and tokens of a block and blocks of each KV cache group."""

    staged: bool
    sizes: tuple
    blocks: tuple

    def rank(self):
        regions = tuple(
            Region(0, count, 1, size, 16, 16 * size, 16 * size, 16, group=group)
            for group, (size, count) in enumerate(zip(self.sizes, self.blocks, strict=True))
        )
        return RankInfo(0, 1, b"", "DRAM", 0, regions, staged=self.staged)


@st.composite
def meetings(draw):
    """Two engines and what one lacks of the other: block sizes that divide each other, buffers of any size."""
    ours = []
    theirs = []
    token_ranges = []
    for group in range(draw(st.integers(1, 3))):
        small, ratio = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        here, there = draw(st.permutations([small, small * ratio]))
        start, length = draw(st.integers(0, 100)), draw(st.integers(1, 200))
        ours.append((here, draw(st.integers(2, 60))))
        theirs.append((there, draw(st.integers(2, 60))))
        token_ranges.append(
            TokenRange(group, start, start + length, table(start, length, there), table(start, length, here))
        )
    sides = [Side(draw(st.booleans()), *zip(*each, strict=True)) for each in (ours, theirs)]
    return *sides, draw(st.permutations(token_ranges))


def table(start, length, size):
    """Blocks whose numbers say of which tokens they are: 1000 and more, so that none is the null block."""
    return [1000 + number for number in range(start // size, -(-(start + length) // size))]


def tokens(token_ranges, sizes, side):
    """Return (group, token, block, place in the block), in order."""
    found = []
    for each in token_ranges:
        blocks = getattr(each, side)
        size = sizes[each.group]
        assert len(blocks) == -(-each.stop // size) - each.start // size, "a part names just the blocks it needs"
        found += [
            (each.group, token, blocks[token // size - each.start // size], token % size)
            for token in range(each.start, each.stop)
        ]
    return sorted(found)


@given(meetings())
def test_the_parts_put_together_are_the_whole(meeting):
    """Every token once, in the same block on both sides."""
    ours, theirs, token_ranges = meeting
    parts = cut(token_ranges, ours.rank(), theirs.rank())

    for sizes, side in ((ours.sizes, "local"), (theirs.sizes, "remote")):
        assert tokens([each for part in parts for each in part], sizes, side) == tokens(token_ranges, sizes, side)


@given(meetings())
def test_the_parts_of_a_group_come_in_order_and_none_is_empty(meeting):
    """P may forget a part when it is asked for the next one."""
    ours, theirs, token_ranges = meeting
    parts = cut(token_ranges, ours.rank(), theirs.rank())

    assert all(parts)
    for part in parts:
        assert all(each.start < each.stop for each in part)
        assert len({each.group for each in part}) == len(part)
    for group in {each.group for each in token_ranges}:
        pieces = [each for part in parts for each in part if each.group == group]
        assert pieces == sorted(pieces, key=lambda each: each.start)
        assert [group in {each.group for each in part} for part in parts] == [
            number < len(pieces) for number in range(len(parts))
        ]


@given(meetings())
def test_no_part_needs_more_than_a_quarter_of_a_buffer(meeting):
    """Unless a quarter is less than one block of the other side: less than that cannot be moved."""
    ours, theirs, token_ranges = meeting

    for part in cut(token_ranges, ours.rank(), theirs.rank()):
        for each in part:
            for side, blocks in ((ours, each.local), (theirs, each.remote)):
                size = side.sizes[each.group]
                other = max(ours.sizes[each.group], theirs.sizes[each.group])
                quarter = max(1, (side.blocks[each.group] - 1) // SHARE)
                assert not side.staged or len(blocks) <= max(quarter, other // size)


@given(meetings())
def test_the_slots_of_a_load_are_enough_for_each_of_its_parts_and_never_more_than_there_are(meeting):
    """They are asked for before the other engine is met: only its blocks that are larger than a quarter do not fit."""
    ours, theirs, token_ranges = meeting
    rank = changed(ours.rank(), staged=True)
    asked = most_blocks(token_ranges, rank)

    assert all(count <= blocks - 1 for count, blocks in zip(asked, ours.blocks, strict=True))
    for part in cut(token_ranges, rank, theirs.rank()):
        for each in part:
            quarter = max(1, (ours.blocks[each.group] - 1) // SHARE)
            assert len(each.local) <= max(asked[each.group], theirs.sizes[each.group] // ours.sizes[each.group])
            assert asked[each.group] <= quarter


@given(meetings())
def test_parts_begin_and_end_with_whole_blocks_of_both_sides(meeting):
    """But for the first and the last: otherwise a block would be staged twice, and written in two halves."""
    ours, theirs, token_ranges = meeting
    wholes = {each.group: each for each in token_ranges}

    for part in cut(token_ranges, ours.rank(), theirs.rank()):
        for each in part:
            for size in (ours.sizes[each.group], theirs.sizes[each.group]):
                assert each.start % size == 0 or each.start == wholes[each.group].start
                assert each.stop % size == 0 or each.stop == wholes[each.group].stop


@given(meetings())
def test_without_staging_there_is_one_part(meeting):
    """Nothing is cut that need not be."""
    ours, theirs, token_ranges = meeting
    ours = ours._replace(staged=False).rank()
    theirs = theirs._replace(staged=False).rank()

    assert cut(token_ranges, ours, theirs) == [list(token_ranges)]
    assert steps(ours, theirs) == {}


def test_a_part_fits_into_a_message_however_large_the_buffer_is():
    """P is told its blocks in one."""
    ours = rank_info("d", blocks=100_000)
    theirs = RankInfo(0, 1, b"", "DRAM", 0, ours.regions, staged=True)
    whole = TokenRange(0, 0, 200_000, range(1, 50_001), range(1, 50_001))

    assert max(len(each.remote) for part in cut([whole], ours, theirs) for each in part) <= MAX_PART


def test_nothing_is_no_part():
    """What is not lacking is not asked for."""
    assert cut([], rank_info("d"), rank_info("p")) == []


def test_each_group_has_blocks_of_its_own_size():
    """As its layers say."""
    assert block_sizes(Side(False, (4, 8), (10, 20)).rank()) == {0: 4, 1: 8}
