"""Plain counters whose keys no client can multiply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.counters import Counters, Histogram

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
