"""How busy an engine is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.load import Load, read_report
from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.core.schemas import NamedMetrics

A, B = RequestId("a"), RequestId("b")


def test_a_request_counts_once_from_its_first_to_its_last_hold():
    """A slot that is reserved and the leg that runs in it are the same request."""
    load = Load()
    for request in (A, A, B):
        load.enter(request)
    assert load.in_flight == 2
    assert not load.leave(A)
    assert load.leave(A)
    assert load.in_flight == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_it_never_counts_below_nothing(steps):
    """What leaves without having entered was held by an engine that was removed and added again."""
    load = Load()
    held = dict.fromkeys("abc", 0)
    for name, enters in steps:
        (load.enter if enters else load.leave)(RequestId(name))
        held[name] = max(held[name] + (1 if enters else -1), 0)

        assert load.in_flight == sum(count > 0 for count in held.values())


def test_a_report_counts_while_it_is_fresh():
    """It includes the requests of other routers, which we cannot see otherwise."""
    load = Load(fresh_s=5)
    load.enter(A)
    load.reported(NamedMetrics(num_requests_waiting=3, kv_cache_usage_perc=0.5), now=10)

    assert [load.score(now=now) for now in (10, 15, 15.1)] == [4.5, 4.5, 1]


def test_vllms_header_is_read():
    """As vLLM 0.32 writes it."""
    header = b'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0}}'

    assert read_report(header) == NamedMetrics(num_requests_waiting=2, kv_cache_usage_perc=0.25)
    assert read_report(b'JSON {"named_metrics": {}}') == NamedMetrics(0, 0)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"TEXT named_metrics.kv_cache_usage_perc=0.4",
        b"JSON",
        b"JSON []",
        b'JSON {"named_metrics": []}',
        b'JSON {"named_metrics": {"num_requests_waiting": -1}}',
        b'JSON {"named_metrics": {"num_requests_waiting": "2"}}',
        b'JSON {"named_metrics": {"num_requests_waiting": 1e300}}',
        b'JSON {"named_metrics": {"kv_cache_usage_perc": NaN}}',
        b'JSON {"named_metrics": {"kv_cache_usage_perc": 7}}',
        b'JSON {"named_metrics": {}, "x": "' + b"x" * 5000 + b'"}',
        b"JSON " + b"[" * 4000,
        b"JSON \xff",
    ],
)
def test_anything_else_is_no_report(header):
    """An engine that says nonsense is judged by what it has from us."""
    assert read_report(header) is None


@given(st.binary())
def test_no_header_is_too_odd(header):
    """It comes from outside."""
    read_report(b"JSON " + header)
