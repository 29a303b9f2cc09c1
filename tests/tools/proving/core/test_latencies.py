"""Percentiles of what clients see."""

from pdrelay_tools.proving.core.latencies import latencies, percentile


def test_percentiles_are_values_that_occurred():
    """The nearest rank: no value between two others is made up."""
    values = [float(number) for number in range(1, 101)]

    assert [percentile(values, percent) for percent in (0, 1, 50, 90, 99, 100)] == [1.0, 1.0, 50.0, 90.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_streams_become_figures():
    """The first token counts from the sending, others from the one before."""
    found = latencies("2P2D", [(10.0, (10.5, 10.6, 10.8)), (11.0, ())], failed=1, seconds=2.0)

    assert [round(each, 6) for each in found.ttft] == [0.5]
    assert [round(each, 6) for each in found.itl] == [0.1, 0.2]
    assert (found.requests, found.failed, found.tokens_per_second) == (3, 1, 1.5)
