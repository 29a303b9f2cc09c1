"""The engines as the relay meets them."""

import pytest

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.push_coordinates import PushCoordinates
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.model import RequestId, Role
from xpyd_proxy.core.protocol.engine_errors import Failure
from xpyd_proxy.core.protocol.push import TransferMode
from xpyd_proxy.core.routing.pairing import PairSelector
from xpyd_proxy.core.routing.policies.least_loaded import LeastLoaded
from xpyd_proxy.core.routing.policies.round_robin import RoundRobin
from xpyd_proxy.core.schemas import Coordinates
from xpyd_proxy.io.request_path.live_fleet import LiveFleet, Loads
from xpyd_proxy.settings import Settings

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
    return LiveFleet(registry, PairSelector(registry, RoundRobin()), learned, clock)


def in_flight(fleet):
    return [member.load.in_flight for member in fleet.registry.members()]


def decode(fleet, place=0):
    return fleet.known(Role.DECODE)[place]


def state(fleet, instance):
    return fleet.registry.member(instance.id).life.state


def test_a_slot_counts_from_the_choice_to_the_end(fleet):
    """The decode engine has nothing of the request yet, and later choices must know that it will."""
    d = decode(fleet)
    fleet.enter(d, R)
    assert in_flight(fleet) == [0, 0, 1, 0]
    fleet.enter(d, R)
    fleet.ended(d, R, None)
    assert in_flight(fleet) == [0, 0, 1, 0]
    fleet.leave(d, R)

    assert in_flight(fleet) == [0, 0, 0, 0]


def test_reserved_slots_decide_the_next_choice(fleet, clock):
    """Ten requests in prefill at the same time are spread over both decode engines."""
    loads = Loads(fleet.registry, clock)
    policy = LeastLoaded(loads.of)
    for number in range(10):
        fleet.enter(policy.one(fleet.known(Role.DECODE)), RequestId(f"r{number}"))

    assert in_flight(fleet)[2:] == [5, 5]


def test_only_the_leg_that_failed_is_blamed(fleet):
    """The other engine of the pair did nothing wrong."""
    p, d = fleet.pair(fleet.usable(Role.PREFILL), fleet.usable(Role.DECODE))
    for instance, failure in ((p, Failure.BAD_RESPONSE), (d, None)):
        fleet.enter(instance, R)
        fleet.ended(instance, R, failure)

    assert (state(fleet, p), state(fleet, d)) == (HealthState.EJECTED, HealthState.STARTING)


def break_and_rest(fleet, clock):
    d = decode(fleet)
    fleet.enter(d, R)
    fleet.ended(d, R, Failure.BAD_RESPONSE)
    assert d not in fleet.usable(Role.DECODE)
    clock.now += 5
    assert d in fleet.usable(Role.DECODE)
    return d


@pytest.mark.parametrize("failure", [None, Failure.BAD_RESPONSE])
def test_a_trial_in_two_legs_is_one_trial(fleet, clock, failure):
    """Its slot is held while the prompt is computed, given back, and taken again for the decode leg."""
    d, trial = break_and_rest(fleet, clock), RequestId("trial")
    assert fleet.one(fleet.usable(Role.DECODE)) == d
    assert d not in fleet.usable(Role.DECODE)
    fleet.enter(d, trial)
    assert d not in fleet.usable(Role.DECODE)
    fleet.enter(d, trial)
    fleet.leave(d, trial)
    if failure is None:
        fleet.answered(d, trial, 0.1)
    fleet.ended(d, trial, failure)

    assert state(fleet, d) is (HealthState.HEALTHY if failure is None else HealthState.EJECTED)


def test_a_trial_whose_prefill_fails_leaves_room_for_the_next(fleet, clock):
    """Or the engine would never be tried again."""
    d = break_and_rest(fleet, clock)
    fleet.one(fleet.usable(Role.DECODE))
    fleet.enter(d, RequestId("trial"))
    fleet.leave(d, RequestId("trial"))

    assert d in fleet.usable(Role.DECODE)


def test_legs_of_an_engine_that_was_removed_may_still_end(fleet):
    """Nothing is known of it any more, and nothing may fail because of that."""
    d = decode(fleet)
    fleet.enter(d, R)
    fleet.registry.remove(d.id, now=0)
    fleet.answered(d, R, 0.1)
    fleet.reported(d, b'JSON {"named_metrics": {}}')
    fleet.ended(d, R, Failure.BAD_RESPONSE)

    assert d not in fleet.known(Role.DECODE)


def test_who_moves_the_blocks_is_learned_from_answers(fleet, learned):
    """And shown, and looked at when a decode engine is declared to do otherwise."""
    p, q = fleet.known(Role.PREFILL)
    learned.learn(p.id, Coordinates("e", "h", 1, tp_size=1))
    learned.learn(q.id, None)
    for instance in (p, q):
        fleet.answered(instance, R, 0.1)
    modes = [fleet.registry.member(one.id).facts.mode for one in (p, q)]

    assert modes == [TransferMode.PUSH, TransferMode.PULL]


def test_a_report_changes_the_load_while_it_is_fresh(fleet, clock):
    """Five seconds; nonsense changes nothing."""
    p = fleet.known(Role.PREFILL)[0]
    loads = Loads(fleet.registry, clock)
    fleet.reported(p, b'JSON {"named_metrics": {"num_requests_waiting": 4}}')
    fleet.reported(p, b"nonsense")
    assert loads.of(p) == 4
    clock.now = 6

    assert loads.of(p) == 0
