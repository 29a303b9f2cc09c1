"""Beside a connector that loads at once, a P hands no KV over that comes of blocks which could not be loaded.

PDRELAY_KIND_SEEDS is how many stories each test has.
"""

import warnings
from collections import Counter

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell.first_token import PARAM as FIRST_TOKEN
    from support.async_kinds import Chances, play
    from support.kinds_table import KINDS
    from support.loading_kinds import LoadingEngine, LoadingPair, PlainEngine

from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(30)
ENGINES = pytest.mark.parametrize("engine", [LoadingEngine, PlainEngine])  # with two steps in flight, and with one


def pair_of(engine, policy="recompute"):
    """Return a class of pairs of such engines; ``policy``: of P, for loads that fail."""
    return type("Pair", (LoadingPair,), {"engine_class": engine, "policy": policy})


def stories(pair_class, name="full attention", blocks=56, **chances):
    """Play some stories; returns what has happened in all of them."""
    counts = Counter()
    shape = KINDS[name].shape(blocks=blocks)
    for seed in range(SEEDS):
        pair = play(shape, shape, Chances(seed, leaves=0.1, **chances), pair_class=pair_class)
        assert not pair.p.connector._scheduler._bad_blocks
        counts += pair.counts
    assert counts["bad blocks"]
    assert counts["loaded"] >= 5 * SEEDS
    return counts


@ENGINES
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name", ["full attention", "sliding window"])
def test_no_kv_of_blocks_that_could_not_be_loaded_is_handed_over(name, policy, engine):
    """Nor is it in P's prefix cache: other prompts begin as this one does."""
    stories(pair_of(engine, policy), name)


@ENGINES
def test_what_is_preempted_meanwhile_leaves_none_behind(engine):
    """The cache has room for one long prompt; some requests are more important than others."""
    assert stories(pair_of(engine), blocks=27, has_priorities=True)["preempted"]


@ENGINES
def test_a_p_that_also_reads_what_d_has_hands_none_over(engine):
    """Some of these reads fail, too."""
    counts = stories(pair_of(engine), blocks=40, returns_kv=True)

    assert counts["returned"] >= SEEDS
    assert counts["failed reads"]


class WindowPair(LoadingPair):
    """Of "first", its second block cannot be loaded; what of it is computed here, "second" hits at once."""

    engine_class = PlainEngine

    def __init__(self, *args):
        self.offers = {}
        super().__init__(*args)

    def _heard(self, output):
        self.offers[output.request] = output.params
        super()._heard(output)

    def elsewhere(self, name, most):
        return 2 if name == "p-first" else 0

    def bad_of(self, numbers):
        return {1}


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_window_of_what_was_computed_of_them_is_taken_back(mode):
    """It has no bad block itself. So vLLM ends its prompt in the same step, and only then do connectors hear of it.

    Its token may be wrong, too, and no router is told to show it.
    """
    shape = KINDS["sliding window"].shape()
    pair = WindowPair(shape, shape, Chances())
    for name, last in (("first", 1), ("second", 2)):
        pair.ask(name, [0] * 16 + [last] * 2, 3, mode)
    pair.run(9.0)

    assert pair.is_done
    assert pair.d.loaded == set()
    assert pair.p.connector.seen["prefills_spoilt"] == 2
    assert pair.offers["p-first"] is None
    assert FIRST_TOKEN not in pair.offers["p-second"]
