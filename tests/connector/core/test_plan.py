"""Which blocks are read, and where to."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xpyd_connector.core.messages import MAX_BLOCKS, Region
from xpyd_connector.core.plan import check_regions, describe, missing_blocks, missing_range
from xpyd_connector.errors import IncompatiblePeer, ProtocolViolation


@st.composite
def admissions(draw):
    """A prompt, the block size, how many whole blocks are cached here, and both block tables."""
    size = draw(st.integers(1, 8))
    tokens = draw(st.integers(2, 40))
    hits = draw(st.integers(0, (tokens - 2) // size))  # vLLM leaves at least one token to load or to compute
    blocks = -(-tokens // size)
    remote = draw(st.lists(st.integers(0, 99), min_size=blocks, max_size=blocks, unique=True))
    local = draw(st.lists(st.integers(0, 99), min_size=blocks, max_size=blocks + 2, unique=True))
    return size, tokens, hits, remote, local


@given(admissions())
@example((4, 2, 0, [7], [8]))  # shorter than a block
@example((4, 4, 0, [7], [8]))  # exactly a block
@example((4, 5, 0, [7, 9], [8, 6]))  # one more: the second block holds only the token that is computed here
@example((4, 9, 1, [1, 2, 3], [4, 5, 6]))  # a local hit
def test_every_missing_token_is_read_once_into_its_place(admission):
    """Against a model that goes token by token: nothing too little, nothing else overwritten."""
    size, tokens, hits, remote, local = admission
    external = tokens - 1 - hits * size
    needed = {position // size for position in range(hits * size, tokens - 1)}
    read, into = missing_blocks(tokens, external, size, remote, local)

    assert list(zip(read, into, strict=True)) == [(remote[number], local[number]) for number in sorted(needed)]


@given(admissions())
def test_push_writes_into_the_same_blocks_that_pull_would_read_into(admission):
    """One arithmetic for both."""
    size, tokens, hits, remote, local = admission
    first, last = missing_range(tokens, tokens - 1 - hits * size, size)

    assert missing_blocks(tokens, tokens - 1 - hits * size, size, remote, local)[1] == local[first:last]
    assert 0 <= first < last <= len(remote)


@pytest.mark.parametrize(("remote", "local"), [([1], [1, 2]), ([1, 2], [1])])
def test_too_few_blocks_on_either_side_are_refused(remote, local):
    """Rather than loading a part and answering from it."""
    with pytest.raises(ProtocolViolation, match="6 prompt tokens need 2 blocks"):
        missing_blocks(6, 5, 4, remote, local)


@st.composite
def caches(draw):
    counts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    blocks = draw(st.lists(st.integers(0, min(counts) - 1), max_size=10))
    return [Region(0, 64, 64, count) for count in counts], blocks


@given(caches())
def test_descriptors_are_numbered_as_nixl_numbers_them(cache):
    """Region after region, block after block: one off would read another layer."""
    regions, blocks = cache
    numbered = [(r, block) for r, region in enumerate(regions) for block in range(region.count)]
    found = describe(regions, blocks)

    assert [numbered[index] for index in found] == [(r, block) for r in range(len(regions)) for block in blocks]
    assert found.dtype == "int32"


@pytest.mark.parametrize("block", [-1, 5, 2**31, 2**62])
def test_a_block_that_is_not_there_is_refused_by_name(block):
    """NIXL would read memory beyond the cache, or crash."""
    with pytest.raises(ProtocolViolation, match=f"block {block} of an engine that has 5 blocks"):
        describe([Region(0, 64, 64, 9), Region(0, 64, 64, 5)], [0, block, 1])


def test_no_blocks_are_no_descriptors():
    """Nothing to read is not an error."""
    assert describe([Region(0, 64, 64, 9)], []).size == 0


def region(length=64, count=4):
    return Region(0, length, length, count)


def test_equal_blocks_fit_whatever_their_number():
    """Prefill and decode engines may have caches of different sizes."""
    check_regions([region(), region(32)], [region(count=9), region(32, count=9)])


def test_a_differing_number_of_regions_is_refused_with_both_numbers():
    """Otherwise a layer would stay unread."""
    with pytest.raises(IncompatiblePeer, match="has 1 regions, ours has 2"):
        check_regions([region(), region()], [region()])


def test_a_differing_block_length_is_refused_with_both_numbers():
    """Bytes would land in the neighbour's block."""
    with pytest.raises(IncompatiblePeer, match="its region 1 has 48 bytes, in ours 64"):
        check_regions([region(), region()], [region(), region(48)])


def test_a_cache_of_more_pieces_than_nixl_can_number_is_refused():
    """An index that overflows its 32 bits would name somebody else's block."""
    huge = [region(count=MAX_BLOCKS)] * 513

    with pytest.raises(IncompatiblePeer, match="pieces"):
        check_regions([region()] * 513, huge)
