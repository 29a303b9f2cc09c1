"""Requests go round pairs that rest, and through them where there is no other way."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import PolicyPerLeg
from pdrelay_proxy.core.routing.policies.least_loaded import LeastLoaded
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.errors import NoMatchingInstance
from pdrelay_proxy.settings import Settings

ports = itertools.count(1)
SETTINGS = Settings(circuit_breaker_failures=1, ejection_time_s=5)


def fleet(x, y, *resting, choice=None):
    """A registry of x and y engines, of which these pairs rest, and a pairing on it."""
    registry = Registry(SETTINGS)
    for role, count in ((Role.PREFILL, x), (Role.DECODE, y)):
        for _ in range(count):
            registry.add(role, Address("http", "h", next(ports) % 60000 + 1))
    for decode in {d for _, d in resting}:
        avoided = frozenset(f"prefill-{p}" for p, d in resting if d == decode)
        registry.learn(f"decode-{decode}", EngineCapabilities(resting=avoided))
    return registry, PairSelector(registry, GroupChoice(choice or RoundRobin()))


def chosen(registry, pairs, count=24, *, may_be_alone=False, ask=None):
    found = set()
    for _ in range(count):
        usable = [registry.usable(role) for role in Role]
        pair = pairs.pair(*usable, ask or RoutingHints(), may_be_alone=may_be_alone)
        found.add(tuple(None if instance is None else int(instance.id.split("-")[1]) for instance in pair))
    return found


@pytest.mark.parametrize("may_be_alone", [False, True])
def test_other_pairs_of_the_same_engines_are_used(may_be_alone):
    """Both are well for all others."""
    assert chosen(*fleet(2, 2, (0, 0)), may_be_alone=may_be_alone) == {(0, 1), (1, 0), (1, 1)}


def test_each_engine_keeps_its_part_of_the_requests():
    """The one without a partner is not overlooked, and none gets far more than the mean."""
    registry, pairs = fleet(3, 3, (0, 0))
    counts = dict.fromkeys(range(3), 0)
    for _ in range(300):
        _, decode = pairs.pair(*[registry.usable(role) for role in Role])
        counts[int(decode.id.split("-")[1])] += 1

    assert all(60 <= count <= 140 for count in counts.values())


def test_a_decode_engine_that_meets_none_serves_alone():
    """With whatever part of the requests it can: the prefill engines' work would be for nothing."""
    rests = itertools.product(range(2), range(2))
    found = chosen(*fleet(2, 4, *rests), may_be_alone=True, count=200)

    assert {pair for pair in found if pair[0] is not None} == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert {pair for pair in found if pair[0] is None} == {(None, 0), (None, 1)}


def test_pairs_that_rest_are_used_if_there_is_no_other_way():
    """Where no engine may serve alone, a slow answer is better than none."""
    assert chosen(*fleet(2, 1, (0, 0), (1, 0))) == {(0, 0), (1, 0)}
    with pytest.raises(NoMatchingInstance, match="the pair rests"):
        chosen(*fleet(2, 1, (0, 0), (1, 0)), may_be_alone=True)


def test_they_are_used_as_soon_as_they_work_again():
    """Choices that were remembered are not."""
    registry, pairs = fleet(2, 1, (0, 0))
    assert chosen(registry, pairs) == {(1, 0)}
    registry.learn("decode-0", EngineCapabilities(resting=frozenset()))

    assert chosen(registry, pairs) == {(0, 0), (1, 0)}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("may_be_alone", [False, True])
def test_the_trial_of_an_engine_goes_to_a_pair_that_can_meet(role, may_be_alone):
    """Else the trial would tell nothing of it."""
    registry, pairs = fleet(2, 2, (0, 0))
    life = registry.member(f"{role}-0").life
    life.failed(RequestId("r"), Failure.UNREACHABLE, now=0.0)
    usable = [registry.usable(each, now=6.0) for each in Role]

    assert life.state is HealthState.HALF_OPEN
    pair = pairs.pair(*usable, may_be_alone=may_be_alone)
    assert tuple(one.id for one in pair) == (
        ("prefill-0", "decode-1") if role == "prefill" else ("prefill-1", "decode-0")
    )


def test_the_trial_of_an_engine_without_other_partners_goes_on():
    """Its only partner is one that it cannot meet: it gets the request all the same."""
    registry, pairs = fleet(1, 1, (0, 0))
    registry.member("decode-0").life.failed(RequestId("r"), Failure.UNREACHABLE, now=0.0)
    usable = [registry.usable(each, now=6.0) for each in Role]

    assert [one.id for one in pairs.pair(*usable)] == ["prefill-0", "decode-0"]


RESTS = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)))


@given(st.integers(1, 5), st.integers(1, 5), RESTS, st.booleans(), st.booleans())
def test_no_request_goes_to_a_pair_that_rests_while_another_is_left(x, y, rests, may_be_alone, least_loaded):
    """Whatever rests, each request gets engines; it is refused only where it may be served alone instead."""
    rests = {(p, d) for p, d in rests if p < x and d < y}
    choice = PolicyPerLeg(LeastLoaded(lambda _: 0.0), LeastLoaded(lambda _: 0.0)) if least_loaded else None
    registry, pairs = fleet(x, y, *rests, choice=choice)
    left = set(itertools.product(range(x), range(y))) - rests
    try:
        found = chosen(registry, pairs, 20, may_be_alone=may_be_alone)
    except NoMatchingInstance:
        assert may_be_alone
        assert not left
        return
    if left:
        assert {pair for pair in found if pair[0] is not None} <= left
    else:
        assert not may_be_alone
        assert {pair[0] for pair in found} != {None}
