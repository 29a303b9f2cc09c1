"""Percentiles of measured values."""

from pdrelay_tools.percentile import percentile


def test_percentiles_are_values_that_occurred():
    """The nearest rank: no value between two others is made up."""
    values = [float(number) for number in range(1, 101)]

    assert [percentile(values, percent) for percent in (0, 1, 50, 90, 99, 100)] == [1.0, 1.0, 50.0, 90.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0
