"""The engines as the relay meets them."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.settings import Settings

R = RequestId("r")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def learned():
    return PushCoordinates(at_once=True)


@pytest.fixture
def fleet(clock, learned):
    registry = Registry(Settings(circuit_breaker_failures=1, ejection_time_s=5))
    for role in Role:
        for port in (1, 2):
            registry.add(role, Address("http", "h", port))
    return LiveFleet(registry, PairSelector(registry, GroupChoice(RoundRobin())), learned, clock)


def decode(fleet, place=0):
    return fleet.known(Role.DECODE)[place]


def state(fleet, instance):
    return fleet.registry.member(instance.id).life.state


def break_and_rest(fleet, clock):
    d = decode(fleet)
    fleet.enter(d, R)
    fleet.ended(d, R, Failure.UNREACHABLE)
    assert d not in fleet.usable(Role.DECODE)
    clock.now += 5
    assert d in fleet.usable(Role.DECODE)
    return d


@pytest.mark.parametrize("failure", [None, Failure.UNREACHABLE])
def test_a_trial_in_two_legs_is_one_trial(fleet, clock, failure):
    """Its slot is held while the prompt is computed, given back, and taken again for the decode leg."""
    d = break_and_rest(fleet, clock)
    trial = RequestId("trial")
    assert fleet.choose(fleet.usable(Role.DECODE)) == d
    assert d not in fleet.usable(Role.DECODE)
    fleet.enter(d, trial)
    assert d not in fleet.usable(Role.DECODE)
    fleet.enter(d, trial)
    fleet.leave(d, trial)
    if failure is None:
        fleet.all_answered(d, (trial,))
    fleet.ended(d, trial, failure)

    assert state(fleet, d) is (HealthState.HEALTHY if failure is None else HealthState.EJECTED)


def test_a_trial_whose_prefill_fails_leaves_room_for_the_next(fleet, clock):
    """Or the engine would never be tried again."""
    d = break_and_rest(fleet, clock)
    fleet.choose(fleet.usable(Role.DECODE))
    fleet.enter(d, RequestId("trial"))
    fleet.leave(d, RequestId("trial"))

    assert d in fleet.usable(Role.DECODE)


def test_legs_of_an_engine_that_was_removed_may_still_end(fleet):
    """Nothing is known of it any more, and nothing may fail because of that."""
    d = decode(fleet)
    fleet.enter(d, R)
    fleet.registry.remove(d.id, now=0)
    fleet.all_answered(d, (R,))
    fleet.reported(d, b'JSON {"named_metrics": {}}')
    fleet.ended(d, R, Failure.UNREACHABLE)

    assert d not in fleet.known(Role.DECODE)
