"""Which rank provides which heads: as vLLM shards them, each once, and evenly from ranks that keep the same."""

from collections import Counter

import pytest

from pdrelay_connector.core.layout.source_ranks import head_sources, heads_of
from pdrelay_connector.errors import IncompatiblePeer

SIZES = range(1, 9)  # tensor parallel
SHARDS = [(ranks, heads) for ranks in SIZES for heads in SIZES if heads % ranks == 0 or ranks % heads == 0]
MEETINGS = [(p, d, heads) for p, heads in SHARDS for d, heads_there in SHARDS if heads == heads_there]


@pytest.mark.parametrize(("ranks", "ranks_here", "heads"), MEETINGS)
def test_every_head_is_taken_once_from_a_rank_that_has_it(ranks, ranks_here, heads):
    """And the ranks that keep the same head are asked equally often, or once less."""
    asked = Counter()
    for rank_here in range(ranks_here):
        found = head_sources(heads, ranks, ranks_here, rank_here)
        taken = [head for owner in found for head in range(owner.first, owner.last)]
        assert taken == list(range(*heads_of(heads, ranks_here, rank_here)))
        assert len({owner.rank for owner in found}) == len(found)
        for rank, first, last in found:
            kept = heads_of(heads, ranks, rank)
            assert kept[0] <= first < last <= kept[1]
        asked.update((head, owner.rank) for owner in found for head in range(owner.first, owner.last))
    for head in range(heads):
        loads = [
            asked[head, rank]
            for rank in range(ranks)
            if heads_of(heads, ranks, rank)[0] <= head < heads_of(heads, ranks, rank)[1]
        ]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(("ranks", "heads"), SHARDS)
def test_equal_engines_pair_up(ranks, heads):
    """Each rank takes everything from the same rank: one peer to meet."""
    for rank in range(ranks):
        assert [owner.rank for owner in head_sources(heads, ranks, ranks, rank)] == [rank]


@pytest.mark.parametrize(("ranks", "heads"), SHARDS)
def test_heads_are_shared_out_as_vllm_does(ranks, heads):
    """In equal parts, or one head for several ranks in a row."""
    kept = [list(range(*heads_of(heads, ranks, rank))) for rank in range(ranks)]
    once = [head for head in range(heads) for _ in range(max(ranks // heads, 1))]

    assert [head for part in kept for head in part] == once
    assert len({len(part) for part in kept}) == 1


@pytest.mark.parametrize(("ranks", "heads"), [(3, 8), (8, 6), (4, 6)])
def test_heads_that_cannot_be_shared_out_are_refused_with_both_numbers(ranks, heads):
    """vLLM has no rule for it either."""
    with pytest.raises(IncompatiblePeer, match=f"{heads} KV heads on {ranks} tensor-parallel ranks; one must be"):
        heads_of(heads, ranks, 0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_its_engine_does_not_have_is_refused(rank):
    """It would keep heads that do not exist."""
    with pytest.raises(IncompatiblePeer, match=f"rank {rank} of an engine of 4 ranks"):
        heads_of(8, 4, rank)
