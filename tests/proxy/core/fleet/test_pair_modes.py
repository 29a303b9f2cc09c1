"""Pull or push for a pair that can do both: the faster way is found, at the price of a few requests."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.fleet.pair_modes import AGAIN_S, ENOUGH, SENT_MOST, PairModes
from xpyd_proxy.core.protocol.push import TransferMode

PULL, PUSH = TransferMode.PULL, TransferMode.PUSH
A, B = ("p0", "d0"), ("p0", "d1")


def run(modes, pair, seconds, count, now=0.0):
    """Serve so many streams one after the other; return their ways. ``seconds``: how long a way takes."""
    ways = []
    for _ in range(count):
        ways.append(modes.next_way(pair, now=now))
        modes.served(pair, ways[-1], seconds(ways[-1]), now=now)
    return ways


@pytest.mark.parametrize("slow", [PULL, PUSH])
def test_the_faster_way_is_chosen_after_few_requests(slow):
    """With a factor of 100, four clients notice it, and no fifth."""
    ways = run(PairModes(), A, lambda way: 1.0 if way is slow else 0.01, 100)

    assert ways.count(slow) == ENOUGH[0][0]
    assert set(ways[2 * ENOUGH[0][0] :]) == {PULL, PUSH} - {slow}


@given(seed=st.integers(0, 1000), factor=st.floats(2.0, 100.0), slow=st.sampled_from([PULL, PUSH]))
def test_prompts_of_all_lengths_do_not_hide_a_large_difference(seed, factor, slow):
    """Whatever they are, the trial ends; where streams differ by less than the ways, the faster one is chosen."""
    dice, modes = random.Random(seed), PairModes()

    ways = run(modes, A, lambda way: dice.uniform(0.9, 1.1) * (factor if way is slow else 1.0), 200)

    assert modes.get(A).chosen not in (None, slow)
    assert ways.count(slow) <= ENOUGH[-1][0]


def test_each_pair_has_its_own_way():
    """A rack with NVLink beside one without."""
    modes = PairModes()
    run(modes, A, lambda way: 1.0 if way is PULL else 0.01, 50)
    run(modes, B, lambda way: 1.0 if way is PUSH else 0.01, 50)

    assert (modes.get(A).chosen, modes.get(B).chosen) == (PUSH, PULL)


def test_what_was_slow_is_tried_again():
    """A link that was mended is found within ten minutes."""
    modes = PairModes()
    run(modes, A, lambda way: 1.0 if way is PULL else 0.1, 50)
    assert set(run(modes, A, lambda _: 0.1, 50, now=AGAIN_S - 1)) == {PUSH}

    run(modes, A, lambda way: 1.0 if way is PUSH else 0.1, 50, now=AGAIN_S)
    assert modes.get(A).chosen is PULL


@pytest.mark.parametrize("works", [PULL, PUSH])
def test_a_way_that_serves_nothing_is_not_chosen(works):
    """A firewall that lets writes through and no reads: for ten minutes all requests would fail."""
    modes = PairModes()
    for _ in range(2 * SENT_MOST + 10):
        if (way := modes.next_way(A, now=0.0)) is works:
            modes.served(A, way, 0.1, now=0.0)

    assert modes.get(A).chosen is works


def test_requests_that_show_nothing_end_the_trial():
    """Clients that stream nothing: the engines' default is as good as any."""
    modes = PairModes()
    ways = [modes.next_way(A, now=0.0) for _ in range(2 * SENT_MOST + 10)]

    assert ways.count(PUSH) == SENT_MOST
    assert modes.get(A).chosen is PULL


def test_many_at_the_same_time_are_shared_out():
    """None of them has shown anything yet."""
    modes = PairModes()
    ways = [modes.next_way(A, now=0.0) for _ in range(10)]

    assert ways.count(PULL) == ways.count(PUSH) == 5


@pytest.mark.parametrize("fixed", [PULL, PUSH])
def test_an_operator_can_choose(fixed):
    """``--kv-transfer-mode``: then nothing is tried, and nothing is remembered."""
    modes = PairModes(fixed)

    assert set(run(modes, A, lambda _: 1.0, 20)) == {fixed}
    assert not len(modes)


def test_it_remembers_no_more_pairs_than_it_may():
    """Nor those of engines that are gone, or were replaced."""
    modes = PairModes(most=2)
    for pair in (A, B, ("p1", "d1")):
        run(modes, pair, lambda _: 1.0, 1)
    assert [modes.get(pair) is None for pair in (A, B, ("p1", "d1"))] == [True, False, False]

    modes.forget("p1")
    modes.keep(frozenset({"p0"}))
    assert not len(modes)
    assert not modes.has_any
