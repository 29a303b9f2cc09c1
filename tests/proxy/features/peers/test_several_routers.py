"""Several routers queue as one does, if they tell each other of their requests: in virtual time."""

import pytest

from support.several_routers import SERVICE_S, mean_and_p95, waits

pytestmark = pytest.mark.slow  # thousands of requests each, in virtual time


def mean(routers, policy, requests=5000, **options):
    return mean_and_p95(waits(routers=routers, policy=policy, requests=requests, **options))[0]


@pytest.mark.parametrize(("delay_s", "lost"), [(0.0002, 0.0), (0.001, 0.01)])
def test_sixteen_routers_queue_as_one_with_power_of_two(delay_s, lost):
    """32 engines at 70 %: within 1.3 x of one router; without the exchange, more than twice as long."""
    one = mean(1, "power_of_two", exchanges=True)

    assert mean(16, "power_of_two", delay_s=delay_s, lost=lost, exchanges=True) <= 1.3 * one
    assert mean(16, "power_of_two", delay_s=delay_s) > 2 * one


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sixteen_routers_queue_as_one_with_least_loaded(seed):
    """8 engines at 70 %, where one router waits a fifth of a prefill; 1 ms between hosts, 1 % of datagrams lost."""
    same = {"policy": "least_loaded", "requests": 3000, "engines": 8, "seed": seed, "exchanges": True}
    one = mean(1, **same)

    assert one > 0.15 * SERVICE_S * 1e3
    assert mean(16, delay_s=0.001, lost=0.01, **same) <= 1.3 * one


@pytest.mark.parametrize(("routers", "delay_s", "lost"), [(2, 0.0005, 0.0), (16, 0.001, 0.01)])
def test_several_routers_come_close_to_one_queue_for_all_engines(routers, delay_s, lost):
    """Least loaded, 32 engines: one router waits 2 % of a prefill, several less than 10 %; without word, over 40 %.

    A ratio of such waits says nothing: a few requests of different routers choose an engine within the delay.
    """
    assert mean(1, "least_loaded") < 0.04 * SERVICE_S * 1e3
    assert mean(routers, "least_loaded", delay_s=delay_s, lost=lost, exchanges=True) < 0.1 * SERVICE_S * 1e3
