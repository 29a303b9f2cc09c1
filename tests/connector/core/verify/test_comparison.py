"""Comparing checksums: every wrong byte that was sampled is found, and no peer makes us read beyond a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import BlockSum, PushDone, RankSums, decode, encode
from pdrelay_connector.core.verify.comparison import Comparison, compare, count, sums_of
from pdrelay_connector.core.verify.sampling import SampledBlock
from support.memory_reader import MemoryReader

THERE = [f"block {number}".encode() for number in range(8)]
SAMPLED = (SampledBlock(0, BlockId(3), 0, 4), SampledBlock(0, BlockId(5), 4, 8), SampledBlock(0, BlockId(6), 8, 9))


def sums(blocks=SAMPLED, **changes):
    return sums_of(0, blocks, MemoryReader(THERE, **changes))


def arrived(start=0, stop=9, *, wrong=()):
    """Return a cache in which the blocks 3, 5 and 6 have arrived as 1, 2 and 4, and the tokens that were loaded."""
    here = [b"other"] * 8
    for block, remote in ((1, 3), (2, 5), (4, 6)):
        here[block] = b"wrong" if remote in wrong else THERE[remote]
    local = [BlockId(block) for block in (1, 2, 4)][start // 4 : -(-stop // 4)]
    return MemoryReader(here), [TokenRange(0, start, stop, [], local)]


@given(wrong=st.sets(st.sampled_from([3, 5, 6])))
def test_each_wrong_block_is_found(wrong):
    """And the failure says how many."""
    cache, token_ranges = arrived(wrong=wrong)
    comparison = compare(sums(), token_ranges, cache)

    assert comparison == Comparison(3, len(wrong))
    assert comparison.failure == (
        f"{len(wrong)} of 3 sampled blocks are not what the prefill engine computed" if wrong else ""
    )


def test_a_block_that_was_not_loaded_is_not_compared():
    """It came from the decode engine's own prefix cache."""
    cache, token_ranges = arrived(start=4, wrong={3})

    assert compare(sums(), token_ranges, cache) == Comparison(2, 0)


def test_a_block_that_was_loaded_in_part_is_not_compared():
    """A window begins in the middle of one; the other tokens of it are not there."""
    cache, token_ranges = arrived(start=2, stop=8, wrong={3})

    assert compare(sums(), token_ranges, cache) == Comparison(1, 0)


def test_blocks_of_another_shape_are_not_compared():
    """The same KV is other bytes there; the load is counted as unchecked."""
    cache, token_ranges = arrived()
    counters = Counters()
    count(compare(sums(shape="another"), token_ranges, cache), counters)

    assert counters.take_report().counters == {"loads_unchecked": 1}
    assert cache.read == []


@given(here=st.sets(st.sampled_from([1, 2, 4])), there=st.sets(st.sampled_from([3, 5, 6])))
def test_a_block_that_cannot_be_read_is_not_compared(here, there):
    """On either side: an engine without memory for a copy goes on, and no load fails for it."""
    p = MemoryReader(THERE)
    (d, token_ranges) = arrived()
    p.unreadable, d.unreadable = there, here
    read = {(1, 3), (2, 5), (4, 6)} - {(block, other) for block in here for other in (3, 5, 6)}
    comparison = compare(sums_of(0, SAMPLED, p), token_ranges, d)

    assert comparison == Comparison(sum(other not in there for _, other in read), 0)


def test_without_a_reader_nothing_is_compared():
    """P still answers, and a load that comes with checksums is counted as unchecked."""
    cache, token_ranges = arrived()
    counters = Counters()
    count(compare(sums(), token_ranges, None), counters)
    count(compare(sums_of(0, SAMPLED, None), token_ranges, cache), counters)

    assert counters.take_report().counters == {"loads_unchecked": 2}


def test_what_was_compared_is_counted():
    """As blocks, of which some are wrong."""
    cache, token_ranges = arrived(wrong={5})
    counters = Counters()
    count(compare(sums(), token_ranges, cache), counters)

    assert counters.take_report().counters == {"blocks_checked": 3, "blocks_wrong": 1}


def test_sums_of_layers_that_this_stage_lacks_are_not_taken():
    """Another stage takes them."""
    assert sums((SampledBlock(1, BlockId(3), 0, 4),)).blocks == ()


@pytest.mark.parametrize(
    "said",
    [BlockSum(0, 4, 4, 1), BlockSum(0, 8, 4, 1), BlockSum(0, 1, 3, 1), BlockSum(0, 0, 8, 1), BlockSum(7, 0, 4, 1)],
    ids=str,
)
def test_a_peer_that_names_no_block_has_nothing_read(said):
    """Whoever reaches a port is hostile."""
    cache, token_ranges = arrived()

    assert compare(RankSums(0, "whole", (said,)), token_ranges, cache) == Comparison(0, 0)
    assert cache.read == []


def test_a_peer_that_names_a_block_again_and_again_has_it_read_once():
    """P decides what is compared, and D's thread works no more for it than for each loaded block once."""
    cache, token_ranges = arrived()
    said = tuple(BlockSum(0, 0, stop, 1) for stop in (4, 4, 3, 2)) + sums().blocks

    assert compare(RankSums(0, "whole", said), token_ranges, cache) == Comparison(3, 1)
    assert len(cache.read) == 3


def test_sums_survive_their_message():
    """As arrays: a sampled block costs some bytes."""
    done = PushDone("reader", True, (sums(),))

    assert decode(encode(done)) == done
    assert len(encode(done)) < 100
