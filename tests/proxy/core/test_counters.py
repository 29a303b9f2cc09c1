"""Plain counters whose keys no client can multiply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.counters import Counters, Histogram
from pdrelay_proxy.core.model import Instance, InstanceId, Role

P = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "h", 1))
D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 2))
PATH = "/v1/completions"


def counters():
    return Counters(frozenset({PATH}))


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


@given(st.lists(st.sampled_from([0.0, 0.001, 0.5, 0.5000001, 1.0, 2.0, 900.0])))
def test_many_values_are_counted_as_each_would_be(values):
    """Also those that are a bound, and those above all of them."""
    single, together = Histogram((0.001, 0.5, 1.0)), Histogram((0.001, 0.5, 1.0))
    for value in values:
        single.observe(value)

    together.observe_all(values)

    assert together.counts == single.counts
    assert together.total == pytest.approx(single.total)


def test_paths_that_are_not_ours_have_one_label():
    """Clients can think of others without end."""
    seen = Counters(frozenset({PATH}))

    assert [seen.label(path) for path in (PATH, "/v1/1", '/v1/"\n')] == [PATH, "other", "other"]


def test_instances_that_are_gone_are_forgotten():
    """Their counters would stay in every scrape for ever."""
    seen = Counters(frozenset({PATH}))
    for instance in (P, D):
        seen.legs[instance.id, instance.role, "ok"] += 1
        seen.answer_times(instance).observe(0.5)
        seen.releases[instance.id, "freed"] += 1
        seen.transfers[instance.id, "none"] += 1
        seen.transfers_missing[(instance.id,)] += 1
        seen.unreachable_hosts[(instance.id,)] += 1
        seen.cache_misses[(instance.id,)] += 1
        seen.engine_tls_failures[instance.id, "expired"] += 1
    seen.mismatches[P.id, D.id] += 1
    seen.keep(frozenset({P.id}))

    of_transfers = seen.releases, seen.transfers, seen.transfers_missing, seen.unreachable_hosts
    for counted in (seen.legs, *of_transfers, seen.cache_misses, seen.engine_tls_failures):
        assert {key[0] for key in counted} == {P.id}
    assert set(seen.prefill_times.by_key) == {(P.id,)}
    assert not seen.decode_ttft.by_key
    assert not seen.mismatches
