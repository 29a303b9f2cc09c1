"""What is remembered of prefill engines."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.fleet.push_coordinates import TRANSITIONS, CoordinatesEvent, CoordinatesState, PushCoordinates
from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.core.schemas import Coordinates

P, Q = InstanceId("prefill-0"), InstanceId("prefill-1")


def at(engine):
    return Coordinates(engine, "h", 5600, tp_size=1)


A, B, C = map(at, "abc")


def learned(*found, at_once=True):
    """Make it learn these one after the other; "x": the engine fails."""
    known = PushCoordinates(at_once=at_once)
    for one in found:
        known.forget(P) if one == "x" else known.learn(P, one)
    return known


@pytest.mark.parametrize(
    ("found", "state", "coordinates"),
    [
        ((), CoordinatesState.UNKNOWN, None),
        ((None,), CoordinatesState.PULL, None),
        ((A,), CoordinatesState.PUSH, A),
        ((A, A), CoordinatesState.PUSH, A),
        ((None, A), CoordinatesState.PUSH, A),
        ((A, None), CoordinatesState.PULL, None),
        ((A, "x"), CoordinatesState.UNKNOWN, None),
        ((A, "x", B), CoordinatesState.PUSH, B),
        ((A, B), CoordinatesState.UNKNOWN, None),  # restarted: the next request goes in turn, and tells
        ((A, B, B), CoordinatesState.PUSH, B),
        ((A, B, A), CoordinatesState.SEVERAL, None),  # both are there
        ((A, B, B, C, C, A), CoordinatesState.SEVERAL, None),
        ((A, B, A, B), CoordinatesState.SEVERAL, None),
        ((A, B, A, None), CoordinatesState.SEVERAL, None),
        ((A, B, A, "x"), CoordinatesState.UNKNOWN, None),
        ((A, B, A, "x", A), CoordinatesState.PUSH, A),
    ],
)
def test_the_life_of_a_record(found, state, coordinates):
    """Coordinates are handed out only while they are good for sure."""
    known = learned(*found)

    assert (known.state(P), known.coordinates(P)) == (state, coordinates)


def test_each_engine_has_its_own_record():
    """One restart says nothing about the others."""
    known = learned(A)
    known.learn(Q, B)
    known.forget(P)

    assert (known.coordinates(P), known.coordinates(Q)) == (None, B)


def test_a_router_that_sends_in_turn_has_no_use_for_coordinates():
    """It still knows who pushes."""
    known = learned(A, at_once=False)

    assert (known.state(P), known.coordinates(P)) == (CoordinatesState.PUSH, None)


def test_the_table_is_complete_where_it_can_be_entered():
    """Somewhere else there are no coordinates that could have changed."""
    missing = {
        pair for pair in itertools.product(CoordinatesState, CoordinatesEvent) if pair[1] not in TRANSITIONS[pair[0]]
    }

    assert missing == {
        (state, CoordinatesEvent.ELSEWHERE)
        for state in (CoordinatesState.UNKNOWN, CoordinatesState.PULL, CoordinatesState.SEVERAL)
    }


@given(st.lists(st.sampled_from([None, A, B, C, "x"]), max_size=30))
def test_no_order_of_news_is_impossible(found):
    """Answers of many requests arrive as they like."""
    known = learned(*found)

    assert (known.coordinates(P) is not None) == (known.state(P) is CoordinatesState.PUSH)
    assert known.coordinates(P) in (None, *found[-1:])
