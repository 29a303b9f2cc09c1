"""Backends are replaced while loads and pushes are under way: what the old ones still move harms nobody.

PDRELAY_KIND_SEEDS is how many stories each test has.
"""

import warnings
from collections import Counter

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from support.async_kinds import Chances, play
    from support.kinds_table import KINDS
    from support.recovering_kinds import RecoveringPair

from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(30)


def stories(name, **chances):
    """Play some stories of a cache with room for one long prompt, and a little."""
    counts = Counter()
    shape = KINDS[name].shape(blocks=27 if name == "full attention" else 40)
    for seed in range(SEEDS):
        counts += play(shape, shape, Chances(seed, leaves=0.3, **chances), pair_class=RecoveringPair).counts
    return counts


@pytest.mark.parametrize("name", ["full attention", "sliding window beside full attention"])
def test_every_token_is_computed_from_the_right_kv_whatever_backend_moved_it(name):
    """In pull, push and KV of answers; no block is lost, and no backend is closed with transfers in flight."""
    counts = stories(name, returns_kv=name == "full attention")

    assert counts["loaded"] >= SEEDS
    assert counts["rebuilt"] >= 1
