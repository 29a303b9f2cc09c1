"""The table of a request's states: what is in it, and that nothing else is."""

import pytest

from xpyd_proxy.requests.lifecycle import TRANSITIONS, RequestEvent, RequestState


def test_every_state_has_a_row():
    """One that is missing would raise for each of its events."""
    assert set(TRANSITIONS) == set(RequestState)


def test_every_state_is_reached():
    """From the one in which a request begins."""
    found, to_see = set(), {RequestState.RECEIVED}
    while to_see:
        state = to_see.pop()
        found.add(state)
        to_see |= set(TRANSITIONS[state].values()) - found

    assert found == set(RequestState)


def test_every_event_leads_somewhere():
    """One that no state knows is not needed."""
    assert {event for row in TRANSITIONS.values() for event in row} == set(RequestEvent)


@pytest.mark.parametrize("state", [state for state in RequestState if state is not RequestState.OVER])
def test_a_request_can_end_in_every_state(state):
    """At once: clients leave whenever they want."""
    assert TRANSITIONS[state][RequestEvent.END] is RequestState.OVER


def test_nothing_happens_to_a_request_that_is_over():
    """Whatever comes later is a bug."""
    assert TRANSITIONS[RequestState.OVER] == {}
