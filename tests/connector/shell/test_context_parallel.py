"""Engines whose ranks divide a context among them (DCP): each rank's kernel finds P's bytes where vLLM looks for them.

As in ``test_cache_kinds.py``, with several workers an engine: vLLM's scheduler and managers run, whose blocks are of
more tokens then; what the workers say is aggregated by vLLM. The rule of which rank keeps a token where is vLLM's own
(``support/token_slots.py``). What vLLM's NixlConnector would read, from which rank, must have moved, too.
"""

import dataclasses
import os
import warnings
from collections import Counter

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.DIVIDES_CONTEXTS:
        pytest.skip("context parallelism is refused in this version", allow_module_level=True)
    from support import kinds_table
    from support import shard_mutants as mutants
    from support.cache_kinds import Shape, play

from pdrelay_connector.errors import UnsupportedCache

FEW = 3
SEEDS = int(os.environ.get("PDRELAY_KIND_SEEDS", FEW))
pytestmark = [
    pytest.mark.usefixtures("no_warnings"),
    pytest.mark.timeout(240 + 60 * (SEEDS - FEW)),  # importing vLLM takes half a minute on a busy machine
    *([pytest.mark.slow] if SEEDS > FEW else []),  # whoever wants more has the time
]


def one_head(size):
    return dataclasses.replace(kinds_table.full(size), num_kv_heads=1)


def window_of_drafts(size):
    return dataclasses.replace(kinds_table.window(size), num_kv_heads=1, dcp_sharded=False)


def indexed(size):
    return kinds_table.KINDS["indexer of sparse attention"].specs(size)


def latent(ranks, shards, interleave=4, size=4, **options):
    return Shape((kinds_table.latent(size),), ranks=ranks, shards=shards, interleave=interleave, **options)


def heads(ranks, shards, interleave=4, size=4, **options):
    """As many copies of each of two heads as there are ranks for it."""
    return Shape((one_head(size),), ranks=ranks, shards=shards, interleave=interleave, heads=2, **options)


def stories(p, d, seeds=SEEDS, **options):
    """Play some stories; returns what has happened in all of them."""
    return sum((play(p, d, seed, **options).counts for seed in range(seeds)), Counter())


EQUAL = {
    "latent vectors": latent(2, 2),
    "latent vectors, one token in turn": latent(2, 2, 1),
    "latent vectors, four ranks, half a block in turn": latent(4, 4, 2),
    "latent vectors, each part twice": latent(4, 2),
    "two heads, each divided": heads(4, 2),
    "two heads, one token in turn": heads(4, 2, 1),
    "smaller blocks of the kernel": latent(2, 2, 4, kernel=2),
    "drafts that are not divided": Shape((kinds_table.latent(4), window_of_drafts(4)), ranks=2, shards=2, interleave=4),
    "an indexer of sparse attention": Shape(indexed(4), ranks=2, shards=2, interleave=4),
    "an indexer, one token in turn": Shape(indexed(4), ranks=2, shards=2),
    "a state": Shape((kinds_table.latent(4), kinds_table.state(4)), ranks=2, shards=2, interleave=4),
    "a state as long as a block": Shape((kinds_table.state(8), kinds_table.latent(4)), ranks=2, shards=2, interleave=4),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_engines_exchange_what_each_rank_keeps(name):
    """By pull and by push, with common beginnings, hits in both caches, and preemption."""
    shape = EQUAL[name]
    counts = stories(shape, shape, is_equal=False)

    assert counts["loads"] >= 4 * SEEDS
    assert counts["loaded"] >= counts["loads"] // 2
    assert counts["hits"] >= 1


def test_requests_that_are_preempted_go_on_with_their_own_bytes():
    """Few blocks; each of them is for more tokens than a rank keeps in it."""
    shape = latent(2, 2, blocks=14)
    counts = stories(shape, shape, 6, is_equal=False)

    assert counts["preempted"] >= 2
    assert counts["loaded"] >= 6


UNEQUAL = {
    "two parts to one": (latent(2, 2), latent(1, 1)),
    "one to two parts": (latent(1, 1), latent(2, 2)),
    "two ranks to two parts": (latent(2, 1), latent(2, 2)),
    "two parts to four": (latent(2, 2), latent(4, 4)),
    "four parts to two": (latent(4, 4), latent(2, 2)),
    "four parts to two, one token in turn": (latent(4, 4, 1), latent(2, 2, 1)),
    "two parts to one, one token in turn": (latent(2, 2, 1), latent(1, 1)),
    "two parts, each twice, to four": (latent(4, 2), latent(4, 4)),
    "larger blocks on D": (latent(2, 2, 4), latent(2, 2, 4, 8)),
    "smaller blocks on D": (latent(2, 2, 2, 8), latent(4, 4, 2, 4)),
    "an indexer, two parts to one": (
        Shape(indexed(4), ranks=2, shards=2, interleave=4),
        Shape(indexed(4)),
    ),
    "an indexer, two parts to four": (
        Shape(indexed(4), ranks=2, shards=2, interleave=4),
        Shape(indexed(4), ranks=4, shards=4, interleave=4),
    ),
    "two heads, divided on P": (heads(4, 2), heads(2, 1)),
    "two heads, divided on D": (heads(2, 1), heads(8, 4)),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_engines_that_divide_otherwise_exchange_what_they_need(name):
    """Several ranks of P have what one of D's needs, or one has what several need."""
    counts = stories(*UNEQUAL[name], is_equal=False)

    assert counts["loads"] >= 4 * SEEDS
    assert counts["loaded"] >= counts["loads"] // 2


IN_TREE = {
    name: pair
    for name, pair in (UNEQUAL | {name: (shape, shape) for name, shape in EQUAL.items()}).items()
    if all(
        side.interleave == 4 and side.kernel == 0 and side.shards in (1, side.ranks) and side.heads == 1
        for side in pair
    )
    and len({spec.block_size for side in pair for spec in side.specs}) == 1
    and "drafts" not in name
}


@pytest.mark.parametrize("name", IN_TREE)
def test_vllms_own_connector_would_move_nothing_else(name):
    """Where it has an answer: latent vectors, parts of all ranks or of none, as many tokens in turn as in a block."""
    counts = stories(*IN_TREE[name], is_equal=False, compares_ranks=True)

    assert counts["in-tree pairs"] >= 10 * SEEDS


@pytest.mark.parametrize(
    "name", ["latent vectors, each part twice", "a state", "four parts to two", "two parts to four"]
)
def test_whatever_fails_no_other_bytes_are_read(name):
    """Connections break, engines stop past a lease, transfers hang and land late, clients leave."""
    pair = UNEQUAL.get(name) or (EQUAL[name], EQUAL[name])
    p, d = (dataclasses.replace(shape, blocks=120) for shape in pair)
    counts = stories(p, d, -(-SEEDS // 2), has_faults=True, is_equal=False)

    assert counts["faults"] >= SEEDS
    assert counts["loaded"] >= SEEDS


@pytest.mark.slow  # what the tests above find
@pytest.mark.parametrize(("mutate", "name"), mutants.MUTANTS, ids=lambda part: getattr(part, "__name__", part))
def test_a_broken_rule_is_noticed(monkeypatch, mutate, name):
    """Each is one rule of the layout turned off; its name says which."""
    pair = UNEQUAL.get(name) or (EQUAL[name], EQUAL[name])
    mutate(monkeypatch)

    with pytest.raises((AssertionError, UnsupportedCache)):
        most_are_loaded(*pair)


def most_are_loaded(p, d):
    counts = stories(p, d, 6, is_equal=False)
    assert counts["loaded"] >= counts["loads"] // 2
