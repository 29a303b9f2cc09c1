"""What a group with a state needs, and which engines can exchange one."""

import numpy as np
import pytest

from pdrelay_connector.core.layout.cache_groups import CacheGroup, left_out_tokens, moved_tokens
from pdrelay_connector.core.layout.parts import cut
from pdrelay_connector.core.layout.shape_checks import check_shapes
from pdrelay_connector.core.layout.transfer_plan import TokenRange, pull_route
from pdrelay_connector.core.messages import RankInfo, Region
from pdrelay_connector.errors import IncompatiblePeer
from support.engines import changed, rank_info

WIDTH = 640


def state_of(rank=0, ranks=1, *, base=0, staged=False, **changes):
    """One rank with one layer; its states are ``WIDTH`` bytes, in pages of twice as many."""
    region = Region(base, 50, 1, 1, WIDTH, 2 * WIDTH, 0, 0, all_heads=ranks, state=True)
    return RankInfo(rank, ranks, b"", "DRAM", 0, (changed(region, **changes),), staged)


@pytest.mark.parametrize("size", [4, 2048])
def test_only_the_state_before_the_next_token_is_needed(size):
    """Whether a part of the tokens is cached here or none; a full hit needs nothing."""
    group = CacheGroup(size, state="s")

    assert [group.missing_tokens(10, external) for external in (9, 5, 1, 0)] == [(8, 9)] * 3 + [(9, 9)]
    assert group.missing_tokens(1, 0) == (0, 0)
    assert group.blocks_of(8, 9) == (slice(2, 3) if size == 4 else slice(0, 1))


def test_a_prefill_leaves_out_the_last_token_where_a_group_has_a_state():
    """Of a prompt of one token nothing is left."""
    full, state = CacheGroup(4), CacheGroup(4, state="s")

    assert (left_out_tokens((full, state), 0), left_out_tokens((full,), 1)) == (1, 0)
    assert [moved_tokens(tokens, 1) for tokens in (1, 2, 10)] == [1, 1, 9]
    assert [moved_tokens(tokens, 0) for tokens in (1, 2, 10)] == [1, 2, 10]


def test_drafts_that_look_ahead_leave_out_as_many_tokens_less_one():
    """They would be guesses; and a replayed window must be laid out for the token that D computes."""
    replayed = CacheGroup(4, window=8, is_replayed=True)

    assert [left_out_tokens((CacheGroup(4),), lookahead) for lookahead in (0, 1, 2, 4)] == [0, 0, 1, 3]
    assert [left_out_tokens((replayed,), lookahead) for lookahead in (0, 4)] == [1, 3]
    assert [moved_tokens(tokens, 3) for tokens in (1, 3, 4, 10)] == [1, 3, 1, 7]


def test_all_of_a_replayed_window_is_loaded():
    """Whatever is cached here of other layers; of a window that is cached, only what is lacking."""
    replayed, cached = CacheGroup(4, window=8, is_replayed=True), CacheGroup(4, window=8)

    assert [replayed.missing_tokens(40, external) for external in (39, 3, 0)] == [(32, 39), (32, 39), (39, 39)]
    assert [cached.missing_tokens(40, external) for external in (39, 3, 0)] == [(32, 39), (36, 39), (39, 39)]


def test_a_ring_is_in_the_only_block_of_its_request():
    """However many tokens have gone through it."""
    ring = CacheGroup(8, state="ring", is_ring=True)

    assert ring.missing_tokens(100, 5) == (98, 99)
    assert ring.blocks_of(98, 99) == slice(0, 1)


def test_a_state_takes_one_block():
    """A request that waits for more would have leases revoked that it does not need."""
    assert [group.new_blocks(40, 8) for group in (CacheGroup(4), CacheGroup(4, state="s"))] == [8, 1]


@pytest.mark.parametrize("staged", [False, True])
def test_a_state_is_moved_whole_from_block_to_block(staged):
    """Without the padding of its page, and in one part even where parts are small."""
    ours, theirs = state_of(), state_of(base=10**6, staged=staged)
    check_shapes(ours, theirs)
    token_range = TokenRange(0, 1898, 1899, (7,), (9,))
    (part,) = cut([token_range], ours, theirs)

    expected = [[10**6 + 7 * 2 * WIDTH, 9 * 2 * WIDTH, WIDTH]]
    assert part == [token_range]
    assert np.array_equal(pull_route(ours, theirs).spans(part), expected)


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (state_of(), state_of(0, 2), "it keeps a state on 2 tensor-parallel ranks, ours on 1; they must be equal"),
        (state_of(0, 2), state_of(), "it keeps a state on 1 tensor-parallel ranks, ours on 2; they must be equal"),
        (state_of(), state_of(state=False), "it keeps KV, ours a state"),
        (rank_info("d"), state_of(), "it keeps a state, ours KV"),
        (state_of(), state_of(width=WIDTH + 4), f"it has entries of {WIDTH + 4} bytes, ours {WIDTH}; they must be"),
    ],
)
def test_unlike_states_are_refused_in_a_sentence(ours, theirs, why):
    """Which byte of it belongs to whom, only the kernel knows."""
    with pytest.raises(IncompatiblePeer, match=f"^region 0: {why}"):
        check_shapes(ours, theirs)


@pytest.mark.parametrize("rank", [0, 1])
def test_with_tensor_parallelism_each_rank_takes_its_own(rank):
    """As many ranks on both sides: they pair up."""
    spans = [
        pull_route(state_of(rank, 2), state_of(there, 2)).spans([TokenRange(0, 8, 9, (7,), (9,))]) for there in (0, 1)
    ]

    assert [bool(len(each)) for each in spans] == [rank == 0, rank == 1]
