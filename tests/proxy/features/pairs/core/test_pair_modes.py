"""Pull or push for a pair that can do both: the faster way is found, at the price of a few requests."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_proxy.features.pairs.core.pair_modes import AGAIN_S, ENOUGH, PAIRS_MOST, SENT_MOST, PairModes, link_kind

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
    dice = random.Random(seed)
    modes = PairModes()

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


def by_slice(pair):
    """Name the kind of a pair: engines are called by their slice and a number."""
    return pair[0][1], pair[1][1]


def rotate(modes, pairs, rounds, slow):
    """Serve one stream of each pair in each round; return the share that went the slow way."""
    count = 0
    for number in range(rounds):
        for pair in pairs:
            way = modes.next_way(pair, now=float(number))
            modes.served(pair, way, 1.0 if way is slow(pair) else 0.01, now=float(number))
            count += way is slow(pair)
    return count / rounds / len(pairs)


@pytest.mark.parametrize(("engines", "most"), [(128, PAIRS_MOST), (40, 1000)])
def test_in_a_large_fleet_the_trials_end(engines, most):
    """With more pairs in turn than are remembered each was new again, and half of all requests went the slower way."""
    pairs = [(f"pa{p}", f"da{d}") for p in range(engines) for d in range(engines)]
    modes = PairModes(most=most)
    rotate(modes, pairs, 2 * ENOUGH[0][0], lambda _: PULL)

    assert rotate(modes, pairs, 1, lambda _: PULL) < 0.01


def test_pairs_that_are_not_remembered_go_the_way_of_their_kind():
    """Those within a slice have another link than those between two."""
    pairs = [(f"p{a}{p}", f"d{b}{d}") for p in range(10) for d in range(10) for a in "ab" for b in "ab"]
    modes = PairModes(kind=by_slice, most=100)

    assert rotate(modes, pairs, 40, lambda pair: PUSH if pair[0][1] == pair[1][1] else PULL) < 0.05
    assert len(modes) == 100
    assert modes.get(pairs[-1]).chosen is PULL
    assert modes.get(pairs[-2]).chosen is PUSH


def test_a_pair_that_is_not_used_any_more_makes_room():
    """What was learned of it is old by then."""
    modes = PairModes(most=2)
    for pair in (A, B):
        run(modes, pair, lambda way: 1.0 if way is PULL else 0.01, 20)
    run(modes, B, lambda _: 0.01, 1, now=AGAIN_S / 2)
    other = ("p1", "d1")
    run(modes, other, lambda way: 1.0 if way is PUSH else 0.01, 20, now=AGAIN_S - 1)
    assert modes.get(other).chosen is PULL  # learned of its kind
    run(modes, other, lambda way: 1.0 if way is PUSH else 0.01, 20, now=AGAIN_S + 1)

    modes.keep(frozenset({"p0", "d1", "d0"}))
    assert len(modes) == 1
    modes.keep(frozenset({"p1", "d1"}))
    assert not len(modes)


def test_what_is_forgotten_of_engines_that_are_gone():
    """Or were replaced: others are at their places."""
    modes = PairModes()
    for pair in (A, B):
        run(modes, pair, lambda _: 1.0, 1)
    modes.forget("d0")
    assert [modes.get(pair) is None for pair in (A, B)] == [True, False]

    modes.keep(frozenset({"p0"}))
    assert not len(modes)
    assert not modes.has_any


def test_links_are_of_one_kind_if_nothing_is_known_that_tells_them_apart():
    """What was learned of one is then taken for another: a rack's, but not that between two racks."""
    registry = Registry()
    p, near, far, other = (
        registry.add(role, Address("http", host, port), facts=EngineCapabilities(slice=part)).id
        for role, host, port, part in [
            (Role.PREFILL, "a", 1, "x"),
            (Role.DECODE, "a", 2, "x"),
            (Role.DECODE, "b", 3, "x"),
            (Role.DECODE, "c", 4, "x"),
        ]
    )
    apart = registry.add(Role.DECODE, Address("http", "d", 5), facts=EngineCapabilities(slice="y")).id

    def kind(*pair):
        return link_kind(registry.get, pair)

    assert kind(p, far) == kind(p, other)
    assert len({kind(p, one) for one in (near, far, apart)}) == 3
