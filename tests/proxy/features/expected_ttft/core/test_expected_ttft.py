"""The cheapest pair, and when one engine is cheaper."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.expected_time import ExpectedTime
from pdrelay_proxy.core.fleet.compatibility import always
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId, Role, RoutingHints
from pdrelay_proxy.core.routing.alone_bound import AloneBound
from pdrelay_proxy.features.expected_ttft.core.expected_ttft import NEAR, ExpectedTtft

ASK = RoutingHints(prompt=b"once upon a time")


def engines(role, count):
    return [Instance(InstanceId(f"{role}-{i}"), role, Address("http", str(role), i + 1)) for i in range(count)]


P, D = engines(Role.PREFILL, 4), engines(Role.DECODE, 4)


class Costs:
    """Costs by engine, in seconds."""

    def __init__(self, costs, *, alone=None, may_pause=True):
        self.costs = costs
        self.by_alone = alone
        self.may_pause = may_pause
        self.may_be_alone = alone is not None
        self.used = Counter()
        self.matches = {}

    def prefill(self, instance, _ask):
        return ExpectedTime(tokens=4, queue_s=self.costs[instance.id])

    def decode(self, instance, _ask):
        return ExpectedTime(tokens=4, transfer_s=self.costs[instance.id], decode_hit=2)

    def alone(self, instance, _ask):
        return ExpectedTime(tokens=4, prefill_s=(self.by_alone or self.costs)[instance.id])

    def spares(self, _alone):
        return self.may_pause

    def cached(self, instance, _ask):
        return int(instance.id[-1]) * 100

    def matched(self, instance, _ask):
        return self.matches.get(instance.id, 0)

    def recent(self, instance):
        return self.used[instance.id]


def by_id(*costs):
    return {one.id: cost for one, cost in zip([*P, *D], costs, strict=True)}


def policy(costs):
    return ExpectedTtft(costs, random.Random(0).randrange)


@given(st.lists(st.floats(0.001, 10), min_size=8, max_size=8))
def test_the_pair_costs_at_most_a_little_more_than_the_best_one(seconds):
    """The two sides are looked at by themselves, and what their parts cost is added up."""
    costs = by_id(*seconds)
    prefill, decode = policy(Costs(costs)).pair(P, D, ASK, always)
    least = min(costs[one.id] for one in P) + min(costs[one.id] for one in D)

    assert costs[prefill.id] + costs[decode.id] <= least * (1 + NEAR) + 1e-9


@given(
    st.lists(st.integers(1, 100), min_size=40, max_size=40), st.sets(st.tuples(st.integers(0, 19), st.integers(0, 19)))
)
def test_the_two_fit_and_few_pairs_are_looked_at(seconds, unfit):
    """Of any number of engines, as long as each fits one of the other side."""
    left, right = engines(Role.PREFILL, 20), engines(Role.DECODE, 20)
    costs = {one.id: cost for one, cost in zip([*left, *right], seconds, strict=True)}
    looked = []

    def fits(p, d):
        looked.append((p, d))
        return left.index(p) == right.index(d) or (left.index(p), right.index(d)) not in unfit

    prefill, decode = policy(Costs(costs)).pair(left, right, ASK, fits)

    assert left.index(prefill) == right.index(decode) or (left.index(prefill), right.index(decode)) not in unfit
    assert len(looked) <= 64 + 20


@given(st.integers(0, 499))
def test_of_many_engines_a_few_are_looked_at_and_always_the_one_that_has_the_prompt(place):
    """The work for a request must not grow with the fleet."""
    left, right = engines(Role.PREFILL, 500), engines(Role.DECODE, 500)
    costs = Costs({one.id: 1.0 for one in [*left, *right]} | {left[place].id: 0.1})
    costs.matches = {left[place].id: 5000}
    looked = []
    costs.prefill = lambda one, _ask: looked.append(one) or ExpectedTime(tokens=4, queue_s=costs.costs[one.id])
    prefill, _ = policy(costs).pair(left, right, ASK, always)

    assert prefill == left[place]
    assert len(looked) <= 64


def test_equals_share_what_comes_and_several_routers_do_not_choose_alike():
    """Chance picks two of them, and the one that was used less gets it."""
    costs = Costs(by_id(*[1.0] * 8))
    chosen = Counter()
    one = policy(costs)
    for _ in range(400):
        pair = one.pair(P, D, ASK, always)
        chosen.update(instance.id for instance in pair)
        costs.used.update(instance.id for instance in pair)

    assert min(chosen.values()) > 80
    assert {policy(costs).pair(P, D, ASK, always)[0].id} != {
        ExpectedTtft(costs, random.Random(seed).randrange).pair(P, D, ASK, always)[0].id for seed in range(20)
    }


@pytest.mark.parametrize(
    ("alone", "may_pause", "is_alone"),
    [(0.1, True, True), (0.1, False, False), (5.0, True, False), (None, True, False)],
)
def test_one_engine_serves_it_if_that_is_faster_and_its_streams_can_bear_it(alone, may_pause, is_alone):
    """By the same cost."""
    by_alone = None if alone is None else by_id(0, 0, 0, 0, 9.0, 9.0, alone, 9.0)
    costs = Costs(by_id(*[1.0] * 8), alone=by_alone, may_pause=may_pause)
    one = policy(costs)

    assert one.alone(P, D, ASK) is is_alone
    if is_alone:
        assert one.choose(D, ASK) == D[2]
        assert one.take_expected(ASK).prefill_s == alone


def room(*busy):
    """Return a bound that keeps prompts from some engines."""
    return AloneBound(Registry(), lambda: 0.0, lambda instance, _: instance not in busy)


def holding(alone, *busy, has=(0, 0, 900, 950)):
    """Return what is found for a prompt of 1,000 bytes of which 200 may be new."""
    costs = Costs(by_id(*[1.0] * 8), alone=by_id(0, 0, 0, 0, *alone))
    costs.cached = lambda instance, _ask: has[int(instance.id[-1])]
    return policy(costs).holding(D, RoutingHints(prompt=b"x" * 1000), 200, room(*busy))


def test_an_engine_that_has_a_prompt_serves_it_alone_although_another_one_is_a_little_faster():
    """What rates are believed to be is noisy, and to compute a prompt again pushes others out of a cache."""
    found = holding((1.0, 1.0, 1.9, 1.9))

    assert (found.engines, found.cached, found.is_bound) == ([D[3]], 950, False)


def test_an_engine_that_has_a_prompt_is_left_for_one_that_takes_less_than_half_as_long():
    """Its queue is long, or it is slow."""
    found = holding((1.0, 1.0, 2.1, 2.1))

    assert (found.engines, found.cached, found.is_bound) == ((), 950, False)


def test_where_streams_cannot_bear_it_another_engine_serves_it_or_it_is_split():
    """In the order of what they have."""
    alone = (1.0, 1.0, 1.0, 1.0)

    assert holding(alone, D[3]).engines == [D[2]]
    assert holding(alone, D[3]).is_bound
    assert holding(alone, D[2], D[3]).engines == ()
    assert holding(alone, D[2], D[3]).is_bound


def test_a_rollout_keeps_a_conversation_where_it_is():
    """Its decode engine has most of it; where none or all have it, that decides nothing."""
    costs = Costs(by_id(*[1.0] * 8))
    ask = RoutingHints(prompt=b"x" * 1000)
    costs.matches = {D[2].id: 600}
    assert policy(costs).holders(D, ask) == [D[2]]
    costs.matches = {D[2].id: 400}
    assert policy(costs).holders(D, ask) == ()
    costs.matches = dict.fromkeys([one.id for one in D], 900)
    assert policy(costs).holders(D, ask) == ()


def test_a_copy_leaves_no_trace():
    """Explaining a request must not be taken for one."""
    chosen = policy(Costs(by_id(*[1.0] * 8)))
    copy = chosen.copy()
    copy.pair(P, D, ASK, always)

    assert chosen.take_expected(ASK) is None
    assert copy.take_expected(ASK).ttft_s == 2.0


def test_what_was_expected_is_told_once_and_of_this_request_alone():
    """One that is sent again has the same prompt; another one may have been chosen for meanwhile."""
    chosen = policy(Costs(by_id(*[1.0] * 8)))
    other = RoutingHints(prompt=bytes(bytearray(ASK.prompt)))

    chosen.pair(P, D, ASK, always)
    assert chosen.take_expected(ASK.once_more()).ttft_s == 2.0
    assert chosen.take_expected(ASK) is None
    chosen.pair(P, D, ASK, always)
    assert chosen.take_expected(other) is None


def test_the_terms_of_a_pair_are_told():
    """The prefill engine's and the decode engine's, in milliseconds and tokens."""
    costs = Costs(by_id(0.012, 9, 9, 9, 0.003, 9, 9, 9))
    chosen = policy(costs)
    chosen.pair(P, D, ASK, always)
    expected = chosen.take_expected(ASK)

    assert str(expected) == "queue=12.0 prefill=0.0 transfer=3.0 decode=0.0 hits=0,2 of 4"
    assert expected.milliseconds == {"queue": 12.0, "prefill": 0.0, "transfer": 3.0, "decode": 0.0, "ttft": 15.0}
