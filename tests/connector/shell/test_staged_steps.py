"""KV goes through host memory while clients leave and requests are preempted, at any step of it, and stays right.

PDRELAY_KIND_SEEDS is how many stories each test has.
"""

import warnings
from collections import Counter

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions
    from support.async_kinds import Chances, play
    from support.kinds_table import KINDS
    from support.staged_kinds import StagedPair

from pdrelay_connector.core.staging.slots import Slots, SlotsGranted
from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(30)
KIND_NAMES = ["full attention", "sliding window beside full attention"]
LATER = ["state of Mamba 2"]  # from vLLM 0.32 on
SLOTS = {"pull": 4, "push": 24}  # a pull has parts of a prompt staged, a push all of it


def stories(mode, name):
    """Play some stories of caches with room for one long prompt, and a little."""
    pair_class = type("Pair", (StagedPair,), {"mode": mode, "slots": SLOTS[mode]})
    shape = KINDS[name].shape(blocks=40)
    counts = Counter()
    for seed in range(SEEDS):
        counts += play(shape, shape, Chances(seed, leaves=0.2, has_priorities=True), pair_class=pair_class).counts
    return counts


@pytest.mark.parametrize("mode", SLOTS)
@pytest.mark.parametrize("name", [*KIND_NAMES, *(LATER if vllm_versions.ASKS_WHAT_IS_LOADED else ())])
def test_every_token_is_computed_from_the_bytes_that_were_staged(name, mode):
    """Some copies fail, connections break, and some transfers land after they were given up."""
    counts = stories(mode, name)

    assert counts["loaded"] >= SEEDS
    assert counts["h2d"] >= counts["loaded"]


@pytest.mark.parametrize("mode", SLOTS)
def test_slots_that_two_have_at_once_are_noticed(mode, monkeypatch):
    """What is in them is another's by the time it is read or copied."""

    def take_granted(slots):
        granted = [
            SlotsGranted(ticket, tuple(tuple(range(1, count + 1)) for count in counts))
            for ticket, counts in slots._waiting.items()
        ]
        slots._waiting.clear()
        return granted

    monkeypatch.setattr(Slots, "take_granted", take_granted)

    with pytest.raises(AssertionError, match="reads other bytes"):
        stories(mode, "full attention")
