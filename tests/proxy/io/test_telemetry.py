"""What the router remembers of its requests for the status page."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.address import Address
from xpyd_proxy.core.counters import Counters
from xpyd_proxy.core.model import Instance, InstanceId, Push, RequestId, Role, Solo
from xpyd_proxy.core.request_record import LegRecord, Outcome, RequestRecord
from xpyd_proxy.core.retries import Failure
from xpyd_proxy.io.telemetry import Telemetry

P = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "h", 1))
D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 2))
R = RequestId("r")


def telemetry(now=(10.0,)):
    times = iter(now)
    return Telemetry(Counters(frozenset({"/v1/completions"})), lambda: next(times, now[-1]))


@pytest.mark.parametrize(("failure", "counts"), [(Failure.BROKEN, True), (Failure.REFUSED, False), (None, False)])
def test_failures_of_an_engine_are_remembered_and_those_of_a_client_are_not(failure, counts):
    """A model that does not exist says nothing about the engine that says so."""
    seen = telemetry()
    seen.leg_ended(D, 2.0, failure, R, 12.0)

    leg = seen.recent.legs[D.id].last(60, now=12.0)
    assert (leg.count, leg.failed, leg.mean) == (1, counts, 2.0)
    assert [(one.where, one.reason, one.at) for one in seen.recent.failures] == [
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
    seen = telemetry()
    record = RequestRecord(R, decode=LegRecord(D.id), fault=fault)
    seen.request_over(record, Outcome("/v1/completions", status, 1.5, first_s=0.5))

    assert [one.reason for one in seen.recent.failures] == ([reason] if reason else [])
    assert seen.recent.requests.last(60, now=10.0).failed == (reason is not None)
    assert seen.recent.ttft.last(60, now=10.0).mean == 0.5


def test_a_path_of_a_clients_own_making_is_not_shown():
    """It is called by the name of all such paths."""
    seen = telemetry()
    seen.request_over(RequestRecord(R), Outcome("/v1/<script>", 500, 1.0))

    assert [one.where for one in seen.recent.failures] == ["other"]


ENDS = st.tuples(
    st.sampled_from(["/v1/completions", "/v1/odd"]),
    st.sampled_from([200, 200, 200, 404, 502]),
    st.sampled_from([None, 0.5]),
    st.fixed_dictionaries(
        {
            "prefill": st.sampled_from([LegRecord(P.id), LegRecord(P.id), None]),
            "decode": st.sampled_from([LegRecord(D.id), None]),
        },
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
    seen, counted = Telemetry(Counters(paths), lambda: 1.0), Counters(paths)
    for one in happened:
        if one == "look":
            assert numbers(seen.counters) == numbers(counted)
        elif len(one) == 2:
            instance, failure = one
            seen.leg_ended(instance, 0.1, failure, R, 1.0)
            counted.leg(instance, failure)
            if failure is None and instance is D:
                seen.leg_answered(instance, 0.2, 1.0)
                counted.answers_of(instance).observe(0.2)
        else:
            path, status, first_s, record = one
            outcome = Outcome(path, status, 1.5, first_s)
            seen.request_over(RequestRecord(R, **record), outcome)
            counted.request(RequestRecord(R, **record), outcome)

    assert numbers(seen.counters) == numbers(counted)
    seen.keep(frozenset())
    seen.leg_ended(D, 0.1, None, R, 1.0)
    assert dict(seen.counters.legs) == {(D.id, D.role, "ok"): 1}


def numbers(counters):
    """All counters."""
    found = {field.name: getattr(counters, field.name) for field in dataclasses.fields(counters)}
    for name in ("ttft", "answers"):
        found[name] = found[name].by_key
    return found
