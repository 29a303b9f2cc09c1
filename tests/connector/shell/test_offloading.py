"""Beside vLLM's OffloadingConnector, in its MultiConnector: its tier has what its hashes say, and each token is right.

PDRELAY_KIND_SEEDS is how many stories each test has.
"""

import warnings
from collections import Counter

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell.offloaded_blocks import OffloadedBlocks
    from pdrelay_connector.shell.vllm_versions import VLLM_VERSION
    from support.async_kinds import Chances, play
    from support.kinds_table import KINDS
    from support.offloading_kinds import OffloadingEngine, OffloadingPair

from pdrelay_connector.errors import SettingsError
from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(30)
FULL = KINDS["full attention"].shape


NOTICES_LOADS = tuple(map(int, VLLM_VERSION.split(".")[:2])) >= (0, 33)
WINDOW = "sliding window beside full attention"


@pytest.mark.parametrize(
    ("name", "sizes", "blocks"),
    [("full attention", (4, 4), 27), ("full attention", (4, 4), 34), (WINDOW, (4, 4), 44), (WINDOW, (4, 8), 60)],
    ids=str,
)
def test_the_tier_has_what_its_hashes_say(name, sizes, blocks):
    """Clients leave meanwhile, and either connector is asked first."""
    shapes = [KINDS[name].shape(size, blocks=blocks) for size in sizes]
    counts = Counter()
    for seed in range(SEEDS):
        counts += play(*shapes, Chances(seed, leaves=0.1), pair_class=OffloadingPair).counts

    assert counts["loaded"] >= 4 * SEEDS
    assert counts["tier stores"] >= 10 * SEEDS
    assert counts["tier loads"] >= SEEDS // 2


def load_what_is_still_copied(mode):
    """D gives the blocks of a request that has ended to a load, before the tier has copied them."""
    pair = OffloadingPair(FULL(blocks=60), FULL(blocks=27), Chances())
    pair.lags = (12,)
    pair.d.tier.worker.is_slow = True
    pair.ask("copied", [0] * 70, 1, "d")
    pair.run(3.0)
    other = [1] * 70
    pair.prefill("loaded", other, mode)
    pair.awaited["p-loaded"] = lambda params: pair.d.ask("loaded", other, most=3, params=params)
    if mode == "push":
        pair.awaited["p-loaded"] = lambda _: pair.register("loaded", other, 3)
    pair.asked["loaded"] = other, [], 3
    pair.run(5.0)
    pair.d.tier.worker.is_slow = False
    pair.run(3.0)

    assert pair.is_done
    assert pair.d.loaded == {"loaded"}
    assert pair.counts["tier stores"]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_load_waits_for_the_copies_of_its_blocks(mode):
    load_what_is_still_copied(mode)


@pytest.mark.skipif(NOTICES_LOADS, reason="this vLLM notices each load itself")
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_load_of_which_the_tier_does_not_know_is_noticed(monkeypatch, mode):
    """As vLLM 0.32 has it."""
    monkeypatch.setattr(OffloadedBlocks, "allocated", lambda *_: None)

    with pytest.raises(AssertionError, match="reads other bytes of cached token"):
        load_what_is_still_copied(mode)


def test_a_push_before_the_worker_has_begun_its_step_is_noticed(monkeypatch):
    """It only then ends the copies."""
    monkeypatch.setattr(OffloadedBlocks, "may_be_copied", False)

    with pytest.raises(AssertionError, match="reads other bytes of cached token"):
        load_what_is_still_copied("push")


def test_what_a_load_has_filled_in_part_is_not_copied(monkeypatch):
    """Without that the tier has what was in the block before the window."""
    monkeypatch.setattr(OffloadedBlocks, "leave_out", lambda *_: None)

    with pytest.raises(AssertionError, match="reads other bytes of cached token"):
        test_the_tier_has_what_its_hashes_say(WINDOW, (4, 8), 60)


def test_after_a_load_that_failed_the_tier_may_load_the_prompt():
    """Which is longer than half of the cache: vLLM would keep as many blocks free for it as it needs."""
    pair = OffloadingPair(FULL(blocks=60), FULL(blocks=27), Chances())
    for name, token in (("first", 0), ("other", 1)):
        pair.ask(name, [token] * 70, 1, "d")
        pair.run(3.0)
    reader = pair.d.movers[1]
    reader.stuck = True
    pair.ask("again", [0] * 70, 3, "pull")
    pair.run(1.0)
    (flight,) = reader._xfers
    reader.cancel(flight)
    pair.run(5.0)

    assert pair.is_done
    assert pair.d.loaded == set()
    assert pair.counts["tier loads"] == 1


def pair_in(**options):
    """Return the class of pairs in whose MultiConnector, not in its connectors, something is set so."""

    class Engine(OffloadingEngine):
        def configure(self, config):
            super().configure(config)
            vars(config.kv_transfer_config).update(options)

    return type("Pair", (OffloadingPair,), {"engine_class": Engine})


def test_a_multi_connector_whose_role_does_not_load_is_refused_around_ours_that_does():
    """VLLM goes by it: blocks are free while a step still writes into them (test_async_steps.py)."""
    with pytest.raises(SettingsError, match="kv_role is kv_both here and kv_producer in MultiConnector"):
        pair_in(kv_role="kv_producer")(FULL(), FULL(), Chances())


def test_what_follows_a_failed_load_is_what_multi_connector_says():
    """A P that would fail a request by a lost read asks no D."""
    for policy in ("recompute", "fail"):
        pair = pair_in(kv_load_failure_policy=policy)(FULL(), FULL(), Chances(returns_kv=True))

        assert pair.p.connector._engine_config.recomputes == (policy == "recompute")


def test_a_push_that_is_aborted_before_it_begins_leaves_nothing():
    """The worker has not begun the step. D's blocks are free again, and P's lease has ended."""
    pair = OffloadingPair(FULL(), FULL(), Chances())
    pair.lags = (0,)
    prompt = [1] * 40
    pair.prefill("leaves", prompt, "push")
    pair.ask("beside", [2] * 10, 40, "d")
    for _ in range(9):
        pair.round()
    pair.register("leaves", prompt, 3)
    while not pair.d.decodes._push_decode.is_deferring:
        pair.round()
    pair.leave("leaves")
    pair.run(9.0)

    assert pair.is_done
    assert pair.d.loaded == set()
    assert [engine.pool.get_num_free_blocks() for engine in (pair.p, pair.d)] == [55, 55]
    assert pair.p.scheduler.requests == pair.d.scheduler.requests == {}
