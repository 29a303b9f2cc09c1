"""The events of a request, between the processes of an engine and in its API server."""

import pytest

from pdrelay_connector.core.counters import EVENTS_DROPPED, Counters, StatsReport, merge
from pdrelay_connector.core.timeline import MAX_EVENTS, TimelineEvent, TimelineStep, TimelineStore, shifted


def event(request, at=0.0, step=TimelineStep.QUEUED):
    return TimelineEvent(request, step, at)


def test_what_was_noted_is_reported_once():
    """With what was counted."""
    counters = Counters(keeps_events=True)
    counters.note("a", TimelineStep.READ, 2.0, 7)
    counters.count("loads")
    first, second = counters.take_report(), counters.take_report()

    assert first == StatsReport(counters={"loads": 1}, events=[TimelineEvent("a", TimelineStep.READ, 2.0, 7)])
    assert not second


def test_nothing_is_noted_where_nobody_can_read_it():
    """It would be counted as dropped, and cost each lease a report."""
    counters = Counters()
    counters.note("a", TimelineStep.READ, 2.0)

    assert not counters.take_report()


def test_events_keep_their_order_when_reports_are_merged():
    """The engine's, then the workers'."""
    merged = merge([StatsReport(events=[event("a", 1.0)]), StatsReport(events=[event("b", 2.0)])])

    assert [each.request for each in merged.events] == ["a", "b"]


def test_an_engine_without_steps_keeps_a_bounded_number():
    """And says how many it has dropped: the oldest."""
    merged = merge([StatsReport(events=[event("a")] * 3), StatsReport(events=[event("b")] * MAX_EVENTS)])

    assert (len(merged.events), merged.events[0].request) == (MAX_EVENTS, "b")
    assert merged.counters == {EVENTS_DROPPED: 3}


def test_events_are_dated():
    """In seconds since the epoch, as the engines' machines have them in common."""
    assert shifted([event("a", 5.0)], 100.0) == [event("a", 105.0)]


@pytest.mark.parametrize(
    ("key", "is_meant"),
    [
        ("cmpl-pdrelay-0123-0-89abcdef", True),
        ("chatcmpl-pdrelay-0123-89abcdef", True),
        ("chatcmpl-pdrelay-0123", True),
        ("pdrelay-0123", True),
        ("cmpl-pdrelay-0123-r1-0-89abcdef", False),  # another try
        ("cmpl-pdrelay-0123-p1-0-89abcdef", False),  # another prompt
        ("cmpl-pdrelay-01234-0-89abcdef", False),
        ("cmpl-apdrelay-0123-0-89abcdef", False),
    ],
)
def test_a_request_is_found_by_the_name_that_the_router_gave_it(key, is_meant):
    """Around which vLLM writes more; a longer name is another's."""
    store = TimelineStore()
    store.add(0, [event(key)])

    assert bool(store.find("pdrelay-0123")) is is_meant


def test_events_of_one_request_are_in_the_order_of_time():
    """Those of a worker come after those of the scheduler, with the same step."""
    store = TimelineStore()
    store.add(1, [event("pdrelay-a", 2.0, TimelineStep.FIRST_TOKEN)])
    store.add(1, [event("pdrelay-a", 1.0, TimelineStep.READ)])

    assert store.find("pdrelay-a") == {
        "pdrelay-a": [
            (1, event("pdrelay-a", 1.0, TimelineStep.READ)),
            (1, event("pdrelay-a", 2.0, TimelineStep.FIRST_TOKEN)),
        ]
    }


def test_the_store_is_bounded():
    """In requests, of which the oldest go, and in events of one."""
    store = TimelineStore(requests=2, events=4)
    store.add(0, [event(f"pdrelay-{name}") for name in "abc"])
    store.add(0, [event("pdrelay-c", float(at)) for at in range(1, 9)])

    assert (len(store), store.find("pdrelay-a")) == (2, {})
    assert [each.at for _, each in store.find("pdrelay-c")["pdrelay-c"]] == [
        0.0,
        1.0,
        7.0,
        8.0,
    ]  # how it began and ended
