"""Waiting times by formula, beside a simulation of the queues that they are about."""

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_tools.planning.queueing import (
    Spread,
    among_routers,
    at_random,
    erlang_c,
    queues_in_turn,
    shared_queue,
    two_choices,
)
from support.several_routers import SERVICE_S, waits

ARRIVALS = 120_000


def _drawing(spread, dice):
    """Draw from the lognormal distribution of this mean and variance."""
    sigma = math.sqrt(math.log(1 + spread.cv2))
    mu = math.log(spread.mean) - sigma**2 / 2
    return lambda: math.exp(mu + sigma * dice.gauss(0, 1))


def _simulated(servers, rate, draw, dice, *, in_turn):
    """Serve Poisson arrivals out of one queue, or of one for each server, which get them in turn.

    Returns all waits, and the share of time that servers were busy.
    """
    free = [0.0] * servers
    now = 0.0
    work = 0.0
    waits = []
    for number in range(ARRIVALS):
        now += dice.expovariate(rate)
        begin = max(now, free[number % servers] if in_turn else free[0])
        service = draw()
        work += service
        waits.append(begin - now)
        if in_turn:
            free[number % servers] = begin + service
        else:
            heapq.heapreplace(free, begin + service)
    return waits, work / servers / now


FORMULAS = {"least loaded": shared_queue, "in turn": queues_in_turn}


@pytest.mark.parametrize("busy", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("servers", [1, 4, 16])
@pytest.mark.parametrize("dispatch", FORMULAS)
@pytest.mark.slow  # eighteen simulations
def test_the_predicted_wait_is_that_of_a_simulation(dispatch, servers, busy):
    """Utilisation within 2 %, mean wait within 15 % or 6 % of a service, its p95 within 20 % or 10 % of a service."""
    dice = random.Random(f"{dispatch} {servers} {busy}")
    service = Spread.lognormal(0.125, 0.125 * 8 / 3)
    rate = servers * busy / service.mean

    expected = FORMULAS[dispatch](servers, rate, service)
    waits, used = _simulated(servers, rate, _drawing(service, dice), dice, in_turn=dispatch == "in turn")
    mean = sum(waits) / ARRIVALS
    p95 = sorted(waits)[int(0.95 * ARRIVALS)]

    assert used == pytest.approx(busy, rel=0.02)
    assert expected.mean == pytest.approx(mean, rel=0.15, abs=0.06 * service.mean)
    assert expected.p95 == pytest.approx(p95, rel=0.20, abs=0.10 * service.mean)
    assert expected.chance == pytest.approx(sum(wait > 0 for wait in waits) / ARRIVALS, abs=0.06)


def test_one_server_is_pollaczek_and_khinchine_whatever_the_policy():
    """M/D/1 at 0.8 waits 2 services, M/M/1 4: both are exact, and both formulas meet there."""
    constant = Spread(1.0, 0.0, 1.0)
    exponential = Spread.exponential(1.0)

    for formula in (shared_queue, queues_in_turn):
        assert formula(1, 0.8, constant).mean == pytest.approx(2.0)
        assert formula(1, 0.8, exponential).mean == pytest.approx(4.0)
        assert formula(1, 0.8, exponential).chance == pytest.approx(0.8)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert shared_queue(3, 3.0, constant).mean == math.inf == queues_in_turn(3, 3.0, constant).mean


def test_a_lognormal_fit_has_the_mean_and_the_p95_it_was_given():
    """Drawn again, both come back."""
    spread = Spread.lognormal(3000, 8000)
    draw = _drawing(spread, random.Random(1))
    values = sorted(draw() for _ in range(200_000))

    assert sum(values) / len(values) == pytest.approx(3000, rel=0.02)
    assert values[190_000] == pytest.approx(8000, rel=0.02)
    assert sum((value / spread.mean - 1) ** 2 for value in values) / len(values) == pytest.approx(spread.cv2, rel=0.1)


ONE = {"round_robin": queues_in_turn, "least_loaded": shared_queue, "power_of_two": two_choices}


@pytest.mark.parametrize(
    ("policy", "routers"), [*((name, 4) for name in ONE), ("least_loaded", 16), ("power_of_two", 1)]
)
def test_the_wait_behind_several_routers_is_about_that_of_a_simulation(policy, routers):
    """The routers' own policies (support/several_routers.py); the mean within 30 % or 20 % of a service."""
    service = Spread.exponential(SERVICE_S)
    engines = 8
    busy = 0.7
    rate = engines * busy / SERVICE_S

    one = ONE[policy](engines, rate, service)
    chance = at_random(engines, rate, service)
    expected = among_routers(one, chance, routers, busy)
    found = waits(routers=routers, policy=policy, engines=engines, busy=busy, requests=12_000)

    assert expected.mean == pytest.approx(sum(found) / len(found), rel=0.3, abs=0.2 * SERVICE_S)


@given(st.integers(1, 64), st.integers(1, 200), st.floats(0.01, 0.99), st.floats(0, 3), st.sampled_from([*ONE]))
def test_more_routers_wait_longer_and_never_longer_than_by_chance(servers, routers, busy, cv2, policy):
    """With one server, and with one router, nothing changes."""
    service = Spread(1.0, cv2, 3.0)
    one = ONE[policy](servers, servers * busy, service)
    chance = at_random(servers, servers * busy, service)
    several = among_routers(one, chance, routers, busy)

    assert min(one.mean, chance.mean) * 0.999 <= several.mean <= max(one.mean, chance.mean) * 1.001
    assert 0 <= several.chance <= 1
    assert among_routers(one, chance, 1, busy) == one


def test_two_choices_are_mitzenmachers_and_lie_between_one_queue_and_chance():
    """0.615 services at 0.7 with many servers."""
    service = Spread.exponential(1.0)

    assert two_choices(10_000, 7000.0, service).mean == pytest.approx(0.615, abs=0.002)
    for servers in (2, 8, 32):
        rate = 0.7 * servers
        found = [wait(servers, rate, service).mean for wait in (shared_queue, two_choices, at_random)]
        assert found == sorted(found)
    assert two_choices(1, 0.7, service) == shared_queue(1, 0.7, service)
