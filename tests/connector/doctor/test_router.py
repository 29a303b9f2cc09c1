"""What a router's metrics say of its hand-overs."""

import pytest

from xpyd_connector.doctor.router import read_router, times_in
from xpyd_connector.errors import Unreachable

TEXT = """
# TYPE xpyd_handoff_gap_seconds histogram
xpyd_handoff_gap_seconds_bucket{le="0.5"} 90
xpyd_handoff_gap_seconds_bucket{le="20.0"} 97
xpyd_handoff_gap_seconds_bucket{le="30.0"} 99
xpyd_handoff_gap_seconds_bucket{le="+Inf"} 100
"""


def test_hand_overs_that_leave_no_step_of_the_lease_are_counted():
    """Of a lease of 30 s, 25 s may pass: the bound below counts."""
    times = times_in(TEXT, lease=30.0, handoff_timeout=20.0)

    assert (times.handoffs, times.slow_handoffs, times.slow) == (100, 3, 20.0)


def test_a_router_that_has_handed_nothing_over_says_nothing():
    assert times_in("", lease=30.0, handoff_timeout=20.0).handoffs == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:1"])
def test_what_is_no_router_is_said(url):
    with pytest.raises(Unreachable):
        read_router(url, lease=30.0, handoff_timeout=20.0)
