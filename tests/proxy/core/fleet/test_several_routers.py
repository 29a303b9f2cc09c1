"""Several routers queue as one does, if they tell each other of their requests: in virtual time."""

import pytest

from support.several_routers import SERVICE_S, mean_and_p95, waits


def mean(routers, policy, **options):
    return mean_and_p95(waits(routers=routers, policy=policy, requests=5000, **options))[0]


@pytest.mark.parametrize("delay_s", [0.0002, 0.0005])
def test_sixteen_routers_queue_as_one_with_power_of_two(delay_s):
    """32 engines at 70 %: within 1.3 x of one router; without the exchange, more than twice as long."""
    one = mean(1, "power_of_two", delay_s=delay_s, exchanges=True)

    assert mean(16, "power_of_two", delay_s=delay_s, exchanges=True) <= 1.3 * one
    assert mean(16, "power_of_two", delay_s=delay_s) > 2 * one


@pytest.mark.parametrize("routers", [2, 16])
def test_several_routers_come_close_to_one_queue_for_all_engines(routers):
    """Least loaded: one router waits 2 % of a prefill, several less than 10 %; without the exchange, over 40 %."""
    assert mean(1, "least_loaded") < 0.04 * SERVICE_S * 1e3
    assert mean(routers, "least_loaded", delay_s=0.0005, exchanges=True) < 0.1 * SERVICE_S * 1e3


def test_without_the_exchange_reports_of_engines_do_not_help():
    """Each router hears of an engine every other second, and a queue lasts for tenths."""
    assert mean(16, "least_loaded") > 1.0 * SERVICE_S * 1e3
