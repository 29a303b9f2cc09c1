"""VLLM schedules a step while the one before computes, and each token is still computed from the right KV.

PDRELAY_KIND_SEEDS is how many stories each test has.
"""

import warnings
from collections import Counter

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.v1.core.sched.scheduler import Scheduler

    from pdrelay_connector.shell import vllm_versions
    from support.async_kinds import AsyncEngine, AsyncPair, Chances, play
    from support.kinds_table import KINDS

from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(30)
RESERVES_DRAFTS = hasattr(Scheduler, "_spec_decode_step_blocks") or vllm_versions.ASKS_WHAT_IS_LOADED
PLAIN = ("full attention", "sliding window beside full attention", "chunks")  # rejected drafts leave them whole


def stories(shape, other=None, **chances):
    """Play some stories; returns what has happened in all of them."""
    counts = (play(shape, other or shape, Chances(seed, **chances)).counts for seed in range(SEEDS))
    return sum(counts, Counter())


LATER = ("state of Mamba 2", "circular buffer", "replayed window (bounded replay)")  # from vLLM 0.32 on


@pytest.mark.parametrize("name", [*PLAIN, *(LATER if vllm_versions.ASKS_WHAT_IS_LOADED else ())])
def test_every_token_is_computed_from_ps_bytes(name):
    """Clients leave and prefix caches are reset meanwhile."""
    counts = stories(KINDS[name].shape(blocks=56), leaves=0.1, resets=0.05)

    assert counts["loaded"] >= 5 * SEEDS


@pytest.mark.parametrize("name", PLAIN if RESERVES_DRAFTS else PLAIN[:1])
def test_drafts_that_were_wrong_are_in_no_block_that_moves(name):
    """And in none that another prompt hits.

    With vLLM 0.30 a cache full of loads and drafts stands still: it keeps no blocks for the drafts of what is loaded
    (mended in 0.31 by https://github.com/vllm-project/vllm/pull/57104). So there is room for them.
    """
    counts = stories(KINDS[name].shape(blocks=40 if RESERVES_DRAFTS else 80), drafts=3, leaves=0.05)

    assert counts["loaded"] >= 5 * SEEDS
    assert counts["accepted"] >= 50 * SEEDS


@pytest.mark.parametrize("name", PLAIN)
def test_the_more_important_come_first_and_all_come_to_an_end(name):
    """The cache has room for one long prompt, and a little."""
    counts = stories(KINDS[name].shape(blocks=40), has_priorities=True)

    assert counts["loaded"] >= 5 * SEEDS


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)], ids=str)
def test_answers_go_back_and_come_again(sizes):
    """P reads what D has of an answer, and lends or pushes it with what follows."""
    p, d = (KINDS["full attention"].shape(size, blocks=34) for size in sizes)
    counts = stories(p, d, returns_kv=True, has_priorities=True, leaves=0.05)

    assert counts["returned"] >= SEEDS
    assert counts["loaded"] >= 5 * SEEDS


def push(seed):
    """Push a prompt that takes P three steps, for which D has lent its blocks before."""
    shape = KINDS["full attention"].shape()
    prompt = [number % 3 for number in range(70)]
    pair = AsyncPair(shape, shape, Chances(seed))
    pair.register("r", prompt, 4)
    for _ in range(6):
        pair.round()
    pair.prefill("r", prompt, "push")
    pair.run(5.0)

    assert pair.is_done
    assert pair.d.loaded == {"r"}


def test_a_step_is_pushed_when_it_is_computed():
    """While the next one is scheduled."""
    for seed in range(4):
        push(seed)


def test_what_is_pushed_before_it_is_computed_is_noticed(monkeypatch):
    """The decode engine reads what was in the blocks before."""
    monkeypatch.setattr(AsyncEngine, "is_computed", lambda _engine, _steps: True)

    with pytest.raises(AssertionError, match="reads other bytes"):
        test_a_step_is_pushed_when_it_is_computed()


def leave():
    """Clients leave all the time, and the cache has room for one long prompt, and a little."""
    shape = KINDS["full attention"].shape(blocks=27)
    for seed in range(60):
        play(shape, shape, Chances(seed, leaves=0.3))


def test_loads_into_what_a_step_still_writes_into_are_noticed(monkeypatch):
    """VLLM frees blocks only after such a step, but for engines whose role loads nothing."""
    make = AsyncEngine._make_scheduler

    def frees_at_once(engine):
        scheduler, hasher = make(engine)
        scheduler.defer_block_free = False
        return scheduler, hasher

    monkeypatch.setattr(AsyncEngine, "_make_scheduler", frees_at_once)

    with pytest.raises(AssertionError, match="reads other bytes"):
        leave()
