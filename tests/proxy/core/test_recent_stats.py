"""The memory of the status page: five minutes, second by second, and never more."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.core.recent_stats import SPAN_S, RecentStats, RollingSeries
from pdrelay_proxy.core.schemas import Bin

QUIET = Bin(0, 0, None, None)


def test_a_ring_adds_up_what_happened_in_each_step():
    """Oldest first, the current second included."""
    ring = RollingSeries()
    ring.add_all([1.0], now=1000.2)
    ring.add_all([3.0], failed=True, now=1000.9)
    ring.add_all([5.0], now=1007.0)

    bins = ring.bins(now=1007.5, step_s=5)
    assert len(bins) == SPAN_S // 5
    assert bins[-2:] == (Bin(2, 1, 2.0, 3.0), Bin(1, 0, 5.0, 5.0))
    assert set(bins[:-2]) == {QUIET}


def test_the_last_seconds_are_one_bin():
    """What the numbers beside the lines say."""
    ring = RollingSeries()
    for now in (10.0, 70.5, 100.0):
        ring.add_all([now], now=now)

    assert ring.last(60, now=100.9) == Bin(2, 0, pytest.approx(85.25), 100.0)
    assert ring.last(60, now=500.0) == QUIET


@given(
    steps=st.lists(st.tuples(st.floats(0, 400), st.floats(0, 1000), st.booleans()), max_size=60),
    later=st.floats(0, 2 * SPAN_S),
)
def test_a_ring_says_what_a_long_memory_would_say(steps, later):
    """Whatever the order of seconds with and without events: the slots of old seconds never shine through."""
    ring = RollingSeries()
    now = 0.0
    events = []
    for wait, value, failed in steps:
        now += wait
        ring.add_all([value], failed=failed, now=now)
        events.append((int(now), value, failed))
    now += later

    recent = [(value, failed) for stamp, value, failed in events if stamp > int(now) - SPAN_S]
    found = ring.last(SPAN_S, now=now)
    assert (found.count, found.failed) == (len(recent), sum(failed for _, failed in recent))
    assert found.worst == max((value for value, _ in recent), default=None)
    assert sum(one.count for one in ring.bins(now=now, step_s=5)) == len(recent)


@given(st.lists(st.tuples(st.integers(0, 400), st.floats(0, 1000)), max_size=60), st.integers(0, 400))
def test_events_that_are_told_late_count_in_their_second(told, later):
    """Good legs wait for some milliseconds until they are counted, and a failure is counted at once."""
    ring = RollingSeries()
    for at, value in told:
        ring.add_all([value], now=float(at))
    now = max((at for at, _ in told), default=0) + later
    latest = -SPAN_S
    expected = []
    for at, value in told:
        latest = max(latest, at)
        if at > latest - SPAN_S:
            expected.append((at, value))

    bins = ring.bins(now=float(now), step_s=1)
    recent = [(at, value) for at, value in expected if at > now - SPAN_S]
    assert [one.count for one in bins] == [
        sum(at == second for at, _ in recent) for second in range(now - 299, now + 1)
    ]
    assert ring.last(SPAN_S, now=float(now)).worst == max((value for _, value in recent), default=None)


def test_a_ring_is_little_for_the_garbage_collector():
    """An object for each second were a million with 2,000 engines: looking at all of them took 70 ms, and 100 MB."""
    gc.collect()
    before = len(gc.get_objects())
    rings = [RollingSeries() for _ in range(100)]
    for second in range(SPAN_S):
        for ring in rings:
            ring.add_all([1.0], now=float(second))

    assert len(gc.get_objects()) - before <= 100 * 10


def test_only_the_latest_failures_are_remembered():
    """The latest first."""
    recent = RecentStats()
    for turn in range(200):
        recent.failed(RequestId(f"r{turn}"), "decode-0", "failed", now=float(turn))

    assert len(recent.failures) == 50
    assert [failure.request for failure in recent.failures][:2] == ["r199", "r198"]
