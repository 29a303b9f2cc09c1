"""What becomes of the events of requests: counters, histograms, the last five minutes, and a line of the log."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.model import Instance, InstanceId, LegOrder, RequestId, Role, SingleEngineReason
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord
from pdrelay_proxy.io.request_path.telemetry import Telemetry

P = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "h", 1))
D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 2))
R = RequestId("r")
PATH = "/v1/completions"
NONE = b'{"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}'


def telemetry(now=10.0):
    return Telemetry(Counters(frozenset({PATH})), lambda: now)


def over(status=200, path=PATH, *, duration_s=1.5, ttft_s=None, queue_s=0.0, end=b"", retries=(), **more):
    """The record of a request that is over."""
    record = RequestRecord(R, path, **{"prefill": LegRecord(P.id), "decode": LegRecord(D.id)} | more)
    record.ttft_s, record.queue_s = ttft_s, queue_s
    for role, failure in retries:
        record.set_aside(role, failure)
    record.wrote(end)
    record.over(status, duration_s)
    return record


def counted(*records):
    seen = telemetry()
    for record in records:
        seen.request_over(record)
    return seen.counters


def count_leg(seen, instance, failure, seconds, at):
    if failure is None:
        seen.legs_over(instance, [], [seconds], at)
    else:
        seen.leg_failed(instance, seconds, failure, R, at)


@pytest.mark.parametrize(("failure", "counts"), [(Failure.BAD_RESPONSE, True), (Failure.REFUSED, False), (None, False)])
def test_failures_of_an_engine_are_remembered_and_those_of_a_client_are_not(failure, counts):
    """A model that does not exist says nothing about the engine that says so."""
    seen = telemetry()
    count_leg(seen, D, failure, 2.0, 12.0)

    leg = seen.recent.legs[D.id].last(60, now=12.0)
    assert (leg.count, leg.failed, leg.mean) == (1, counts, 2.0)
    assert [(one.where, one.reason, one.at) for one in seen.recent.failures] == [
        ("decode-0", "a leg failed", 12.0)
    ] * counts
    assert seen.counters.legs == {(D.id, "decode", failure or "ok"): 1}


@pytest.mark.parametrize("failure", Failure)
def test_every_failure_of_a_leg_has_words_for_the_status_page(failure):
    """They name no address and nothing that an engine said."""
    seen = telemetry()
    seen.leg_failed(D, 2.0, failure, R, 12.0)

    assert all(one.reason.startswith("a leg ") for one in seen.recent.failures)


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (502, "decode-0 failed to decode", "answered with 502"),
        (200, "decode-0 broke off", "answered with 200, and the stream was aborted"),
        (200, None, None),
        (404, "no such model", None),
        (499, None, None),
    ],
)
def test_what_a_client_had_to_suffer_is_remembered_in_our_own_words(status, error, reason):
    """Anybody may read the page: engines' words stay in the log."""
    seen = telemetry()
    seen.request_over(over(status, error=error, ttft_s=0.5))

    assert [one.reason for one in seen.recent.failures] == ([reason] if reason else [])
    assert seen.recent.requests.last(60, now=10.0).failed == (reason is not None)
    assert seen.recent.ttft.last(60, now=10.0).mean == 0.5


def test_a_path_of_a_clients_own_making_is_not_shown():
    """It is called by the name of all such paths, on the page and in the metrics."""
    seen = telemetry()
    for turn in range(100):
        seen.request_over(over(500, f"/v1/<script>{turn}", ttft_s=0.1, decode=None))

    assert {one.where for one in seen.recent.failures} == {"other"}
    assert seen.counters.requests == {("other", "server_error"): 100}
    assert list(seen.counters.ttft.by_key) == [("other",)]
    assert not seen.counters.routed


def test_retries_are_counted_by_the_leg_that_failed_and_why():
    """Clients do not notice them; operators should."""
    failed = (Role.PREFILL, Failure.BAD_RESPONSE), (Role.PREFILL, Failure.TIMEOUT), (Role.DECODE, Failure.HTTP_5XX)
    found = counted(over(retries=failed))

    assert found.retries == {("prefill", "bad_response"): 1, ("prefill", "timeout"): 1, ("decode", "http_5xx"): 1}


def test_silent_degradation_is_counted_where_it_can_be_known():
    """When one leg follows the other the decode engine repeats the prefill engine's number, which says nothing."""
    found = counted(
        over(push=LegOrder.CONCURRENT, end=NONE),
        over(push=LegOrder.CONCURRENT, end=NONE.replace(b"0", b"8")),
        over(push=LegOrder.CONCURRENT),
        over(end=NONE),
        over(500, push=LegOrder.CONCURRENT, end=NONE),
        over(single_reason=SingleEngineReason.N, prefill=None, end=NONE),
    )

    assert found.transfers == {(D.id, "none"): 1, (D.id, "arrived"): 1, (D.id, "unknown"): 2}
    assert found.transfers_missing == {(D.id,): 1}


ENDS = st.builds(
    over,
    status=st.sampled_from([200, 200, 200, 404, 499, 502]),
    path=st.sampled_from([PATH, "/v1/odd"]),
    queue_s=st.sampled_from([None, 0.0, 0.0, 0.25]),
    prefill=st.sampled_from([LegRecord(P.id), LegRecord(P.id), None]),
    decode=st.sampled_from([LegRecord(D.id), None]),
    single_reason=st.sampled_from([None, None, SingleEngineReason.N]),
    push=st.sampled_from([None, None, LegOrder.SEQUENTIAL]),
    error=st.sampled_from([None, None, "broke off"]),
)
LEGS = st.tuples(st.sampled_from([P, D]), st.sampled_from([None, None, Failure.BAD_RESPONSE]))


@given(happened=st.lists(st.one_of(ENDS, LEGS, st.just("look")), max_size=30))
def test_what_is_added_up_beside_the_counters_is_in_them_when_they_are_read(happened):
    """The same as if each leg and each request had been counted by itself."""
    seen = telemetry()
    requests = Counter()
    routed = Counter()
    transfers = Counter()
    legs = Counter()
    queued = Counter()
    for one in happened:
        if isinstance(one, tuple):
            instance, failure = one
            count_leg(seen, instance, failure, 0.1, 1.0)
            legs[instance.id, instance.role, failure or "ok"] += 1
        elif one != "look":
            seen.request_over(one)
            path = PATH if one.path == PATH else "other"
            requests[path, one.outcome] += 1
            queued[(path,)] += one.queue_s is not None
            if one.decode is not None:
                routed[one.mode, one.single_reason or "none"] += 1
                if one.prefill is not None and one.status == 200:
                    transfers[D.id, "unknown"] += 1
        if one == "look":
            check(seen.counters, requests, routed, transfers, legs, queued)
    check(seen.counters, requests, routed, transfers, legs, queued)

    seen.keep(frozenset())
    seen.legs_over(D, [], [0.1], 1.0)
    assert dict(seen.counters.legs) == {(D.id, D.role, "ok"): 1}


def check(counters, requests, routed, transfers, legs, queued):
    assert (counters.requests, counters.routed, counters.transfers) == (requests, routed, transfers)
    assert counters.legs == legs
    assert {key: sum(one.counts) for key, one in counters.queue_times.by_key.items()} == +queued
    assert {key: sum(one.counts) for key, one in counters.durations.by_key.items()} == requests
