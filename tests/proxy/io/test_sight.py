"""What the router remembers of its requests for the status page."""

import pytest

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.journey import Journey, Outcome, Visit
from xpyd_proxy.core.measures import Measures
from xpyd_proxy.core.model import Instance, InstanceId, RequestId, Role
from xpyd_proxy.core.retries import Failure
from xpyd_proxy.io.sight import Sight

D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 2))
R = RequestId("r")


def sight(now=(10.0,)):
    times = iter(now)
    return Sight(Measures(frozenset({"/v1/completions"})), lambda: next(times, now[-1]))


@pytest.mark.parametrize(("failure", "counts"), [(Failure.BROKEN, True), (Failure.REFUSED, False), (None, False)])
def test_failures_of_an_engine_are_remembered_and_those_of_a_client_are_not(failure, counts):
    """A model that does not exist says nothing about the engine that says so."""
    seen = sight((10.0, 12.0))
    seen.began(D, R)
    seen.ended(D, R, failure)

    leg = seen.pulse.legs[D.id].last(60, now=12.0)
    assert (leg.count, leg.failed, leg.mean) == (1, counts, 2.0)
    assert [(one.where, one.reason, one.at) for one in seen.pulse.mishaps] == [
        ("decode-0", "a leg failed", 12.0)
    ] * counts


@pytest.mark.parametrize(
    ("status", "fault", "reason"),
    [
        (502, "decode-0 failed to decode", "answered with 502"),
        (200, "decode-0 broke off", "answered with 200, and then a fault"),
        (200, None, None),
        (404, "no such model", None),
        (499, None, None),
    ],
)
def test_what_a_client_had_to_suffer_is_remembered_in_our_own_words(status, fault, reason):
    """Anybody may read the page: engines' words stay in the log."""
    seen = sight()
    journey = Journey(R, decode=Visit(D.id), fault=fault)
    seen.finished(journey, Outcome("/v1/completions", status, 1.5, first_s=0.5))

    assert [one.reason for one in seen.pulse.mishaps] == ([reason] if reason else [])
    assert seen.pulse.requests.last(60, now=10.0).failed == (reason is not None)
    assert seen.pulse.ttft.last(60, now=10.0).mean == 0.5


def test_a_path_of_a_clients_own_making_is_not_shown():
    """It is called by the name of all such paths."""
    seen = sight()
    seen.finished(Journey(R), Outcome("/v1/<script>", 500, 1.0))

    assert [one.where for one in seen.pulse.mishaps] == ["other"]
