"""Counts that slide."""

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.failure_window import FailureWindow


@given(st.lists(st.tuples(st.floats(0, 8), st.booleans()), max_size=60))
def test_it_holds_at_least_half_a_window_and_at_most_a_whole_one(events):
    """Not exact, and bounded in memory whatever the rate."""
    window = FailureWindow(10.0)
    now = 0.0
    past = []
    for pause, failed in events:
        now += pause
        window.count(failed=failed, now=now)
        past.append((now, failed))
    legs, bad = window.totals(now=now)

    assert sum(now - when < 4.99 for when, _ in past) <= legs <= sum(now - when < 10.01 for when, _ in past)
    assert bad <= sum(failed for when, failed in past if now - when < 10.01)


def test_it_can_forget():
    """After a restart the engine starts with a clean slate."""
    window = FailureWindow(10.0)
    window.count(failed=True, now=0)
    window.clear()

    assert window.totals(now=0) == (0, 0)
