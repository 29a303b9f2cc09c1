"""What clients see of a load."""

from pdrelay_tools.proving.core.latencies import in_ms, latencies


def test_no_values_have_no_percentiles():
    """A load whose requests have all failed."""
    assert in_ms([]) == "- / - / -"


def test_streams_become_figures():
    """The first token counts from the sending, others from the one before."""
    found = latencies("2P2D", [(10.0, (10.5, 10.6, 10.8)), (11.0, ())], failed=1, seconds=2.0)

    assert [round(each, 6) for each in found.ttft] == [0.5]
    assert [round(each, 6) for each in found.itl] == [0.1, 0.2]
    assert (found.requests, found.failed, found.tokens_per_second) == (3, 1, 1.5)
