"""Which tokens of a prompt a group keeps and lacks, against a statement that goes token by token."""

import itertools

import pytest

from pdrelay_connector.core.layout.cache_groups import CacheGroup

LENGTHS = range(1, 70)  # of a prompt: several blocks, windows and chunks
GROUPS = [
    *(CacheGroup(size) for size in (1, 4, 16)),
    *(CacheGroup(size, window=window) for size in (1, 4, 16) for window in (1, 2, 3, 4, 5, 15, 16, 17, 40, 100)),
    *(CacheGroup(size, chunk=chunk) for size in (1, 4, 16) for chunk in (1, 4, 8, 16, 24, 64, 100)),
]


def seen(group, token):
    """Return the earlier tokens that attention of a token looks at: the definition of each kind of layer."""
    if group.window:
        return [before for before in range(token) if token - before < group.window]
    if group.chunk:
        return [before for before in range(token) if before // group.chunk == token // group.chunk]
    return list(range(token))


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_what_a_token_needs_is_what_its_attention_sees(group):
    """Not a token less, or the answer is wrong; not a token more, or KV travels that nobody looks at."""
    for computed in LENGTHS:
        assert list(range(group.first_needed(computed), computed)) == seen(group, computed)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_missing_tokens_are_those_the_last_prompt_token_attends_to(group):
    """With every number of tokens that come from elsewhere: the others are in the local prefix cache."""
    for prompt in LENGTHS:
        for external in range(prompt):
            start, stop = group.missing_tokens(prompt, external)
            local = prompt - 1 - external

            assert stop == prompt - 1
            assert list(range(start, stop)) == [token for token in seen(group, prompt - 1) if token >= local]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_later_tokens_never_need_earlier_ones_again(group):
    """Otherwise blocks could not be freed while a request runs."""
    firsts = [group.first_needed(computed) for computed in LENGTHS]

    assert firsts == sorted(firsts)


def test_only_a_window_and_a_chunk_forget():
    """Blocks of the others are all there when their request ends."""
    assert [CacheGroup(4).frees_early, CacheGroup(4, window=8).frees_early, CacheGroup(4, chunk=8).frees_early] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_blocks_of_a_stretch_are_those_that_its_tokens_are_in(size):
    """And none beside them."""
    table = list(range(40))
    for start, stop in itertools.combinations(range(30), 2):
        blocks = table[CacheGroup(size).blocks_of(start, stop)]

        assert blocks == sorted({token // size for token in range(start, stop)})
