"""What the router remembers of its requests for the status page."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.journey import Journey, Outcome, Visit
from xpyd_proxy.core.measures import Measures
from xpyd_proxy.core.model import Instance, InstanceId, Push, RequestId, Role, Solo
from xpyd_proxy.core.protocol.engine_errors import Failure
from xpyd_proxy.io.sight import Sight

P = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "h", 1))
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


ENDS = st.tuples(
    st.sampled_from(["/v1/completions", "/v1/odd"]),
    st.sampled_from([200, 200, 200, 404, 502]),
    st.sampled_from([None, 0.5]),
    st.fixed_dictionaries(
        {"prefill": st.sampled_from([Visit(P.id), Visit(P.id), None]), "decode": st.sampled_from([Visit(D.id), None])},
        optional={
            "solo": st.just(Solo.N),
            "push": st.just(Push.IN_TURN),
            "fault": st.just("broke off"),
            "client_id": st.just("c"),
        },
    ),
)
LEGS = st.tuples(st.sampled_from([P, D]), st.sampled_from([None, None, Failure.BROKEN]))


@given(happened=st.lists(st.one_of(ENDS, LEGS, st.just("look")), max_size=30))
def test_what_is_added_up_beside_the_counters_is_in_them_when_they_are_read(happened):
    """The same as if each leg and each request had been counted by itself."""
    paths = frozenset({"/v1/completions"})
    seen, counted = Sight(Measures(paths), lambda: 1.0), Measures(paths)
    for one in happened:
        if one == "look":
            assert numbers(seen.measures) == numbers(counted)
        elif len(one) == 2:
            instance, failure = one
            seen.rode(instance, 0.1, failure, R, 1.0)
            counted.leg(instance, failure)
            if failure is None and instance is D:
                seen.said(instance, 0.2, 1.0)
                counted.answers_of(instance).observe(0.2)
        else:
            path, status, first_s, journey = one
            outcome = Outcome(path, status, 1.5, first_s)
            seen.finished(Journey(R, **journey), outcome)
            counted.request(Journey(R, **journey), outcome)

    assert numbers(seen.measures) == numbers(counted)
    seen.keep(frozenset())
    seen.rode(D, 0.1, None, R, 1.0)
    assert dict(seen.measures.legs) == {(D.id, D.role, "ok"): 1}


def numbers(measures):
    """All counters."""
    found = {field.name: getattr(measures, field.name) for field in dataclasses.fields(measures)}
    for name in ("ttft", "answers"):
        found[name] = found[name].by_key
    return found
