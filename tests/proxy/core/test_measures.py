"""Plain counters whose keys no client can multiply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.journey import HUNG_UP, Journey, Outcome, Visit
from xpyd_proxy.core.measures import Histogram, Measures
from xpyd_proxy.core.model import Instance, InstanceId, Push, RequestId, Role, Solo
from xpyd_proxy.core.protocol.engine_errors import Failure

P = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "h", 1))
D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 2))
PATH = "/v1/completions"


def measures():
    return Measures(frozenset({PATH}))


def journey(**more):
    return Journey(RequestId("r"), prefill=Visit(P.id), decode=Visit(D.id), **more)


@given(st.lists(st.floats(0, 1000)), st.lists(st.floats(0.001, 500), unique=True).map(sorted))
def test_a_histogram_counts_every_value_once(values, bounds):
    """Each at the lowest bound that is not below it."""
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)

    assert sum(histogram.counts) == len(values)
    assert histogram.total == pytest.approx(sum(values))
    for place, bound in enumerate(bounds):
        assert sum(histogram.counts[: place + 1]) == sum(value <= bound for value in values)


@pytest.mark.parametrize(
    ("status", "fault", "ending"),
    [
        (200, None, "2xx"),
        (200, "it broke off", "faulty"),
        (404, "no such model", "4xx"),
        (HUNG_UP, None, "hung_up"),
        (503, None, "5xx"),
    ],
)
def test_requests_are_told_apart_by_how_they_ended_for_the_client(status, fault, ending):
    """A stream that broke off has status 200 and is no success."""
    seen = measures()
    seen.request(journey(fault=fault), Outcome(PATH, status, 1.0))

    assert seen.requests == {(PATH, ending): 1}


def test_paths_that_nobody_serves_are_one():
    """Clients can think of others without end."""
    seen = measures()
    for turn in range(100):
        seen.request(Journey(RequestId("r")), Outcome(f"/v1/{turn}", 404, 0.1, first_s=0.1))

    assert seen.requests == {("other", "4xx"): 100}
    assert list(seen.ttft.by_key) == [("other",)]
    assert not seen.routes


def test_the_way_of_a_request_is_counted():
    """Which rule fired shows in the numbers."""
    seen = measures()
    for one in (journey(), journey(push=Push.AT_ONCE), journey(solo=Solo.N)):
        seen.request(one, Outcome(PATH, 200, 1.0))

    assert seen.routes == {("prefill first",): 1, ("push",): 1, ("solo: n>1",): 1}


def test_retries_are_counted_by_the_leg_that_failed_and_why():
    """A reason we have no word for is one more reason, and not one more counter each."""
    seen, one = measures(), journey()
    for reason in (Failure.BROKEN, Failure.UNREACHABLE, "something 1", "something 2"):
        one.set_aside(Role.PREFILL, reason)
    one.set_aside(Role.DECODE, Failure.BROKEN)
    seen.request(one, Outcome(PATH, 200, 1.0))

    assert seen.retries == {
        ("prefill", "broken"): 1,
        ("prefill", "unreachable"): 1,
        ("prefill", "other"): 2,
        ("decode", "broken"): 1,
    }


def test_silent_degradation_is_counted_where_it_can_be_known():
    """When one leg follows the other the decode engine repeats the prefill engine's number, which says nothing."""
    seen = measures()
    none = b'{"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}'
    for one, said, status in (
        (journey(push=Push.AT_ONCE), none, 200),
        (journey(push=Push.AT_ONCE), none.replace(b"0", b"8"), 200),
        (journey(push=Push.AT_ONCE), b"", 200),
        (journey(), none, 200),
        (journey(push=Push.AT_ONCE), none, 500),
        (Journey(RequestId("r"), solo=Solo.N, decode=Visit(D.id)), none, 200),
    ):
        seen.request(one, Outcome(PATH, status, 1.0, said=said))

    assert seen.arrivals == {(D.id, "none"): 1, (D.id, "arrived"): 1, (D.id, "unknown"): 2}


def test_instances_that_are_gone_are_forgotten():
    """Their counters would stay in every scrape for ever."""
    seen = measures()
    for instance in (P, D):
        seen.leg(instance, None)
        seen.leg(instance, Failure.SILENT)
        seen.answers_of(instance).observe(0.5)
        seen.released(instance, freed=True)
    seen.differed(P.id, D.id)
    seen.request(journey(), Outcome(PATH, 200, 1.0))
    assert seen.legs[D.id, "decode", "silent"] == 1
    seen.keep(frozenset({P.id}))

    assert set(seen.legs) == {(P.id, "prefill", "ok"), (P.id, "prefill", "silent")}
    assert set(seen.answers.by_key) == {(P.id, "prefill")}
    assert set(seen.releases) == {(P.id, "freed")}
    assert not seen.arrivals
    assert not seen.mismatches
