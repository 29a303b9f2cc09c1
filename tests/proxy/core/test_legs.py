"""Legs under way, and the time a request hangs between its two."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core import legs
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.legs import TRANSITIONS, Event, Legs, State
from xpyd_proxy.core.model import Instance, InstanceId, RequestId, Role

P = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "h", 1))
D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 2))
R = RequestId("r")


def test_the_gap_is_the_time_between_the_answer_and_the_next_leg():
    """Nothing renews the lease on the blocks meanwhile, so operators want it short."""
    legs = Legs()
    assert legs.began(P, R, now=1.0) is None
    legs.answered(P, R, now=2.0)
    assert legs.ended(P, R, now=2.5) == 1.5

    assert legs.began(D, R, now=2.75) == 0.75


def test_legs_that_go_out_together_have_no_gap():
    """In push the decode leg does not wait for the answer; and a decode leg without a prefill has none either."""
    legs = Legs()
    legs.began(P, R, now=1.0)

    assert legs.began(D, R, now=1.0) is None
    legs.answered(P, R, now=2.0)
    assert legs.began(D, RequestId("solo"), now=3.0) is None


def test_one_answer_makes_one_gap():
    """A decode leg that is sent again to another engine waited for that, and not for the handoff."""
    legs = Legs()
    legs.began(P, R, now=1.0)
    legs.answered(P, R, now=2.0)

    assert legs.began(D, R, now=3.0) == 1.0
    legs.ended(D, R, now=4.0)
    assert legs.began(D, R, now=5.0) is None


def test_answers_that_nobody_followed_up_are_dropped_in_the_end():
    """A client that leaves between the legs must not cost memory for ever."""
    watched = Legs()
    for turn in range(3 * legs._PROMISED):
        request = RequestId(str(turn))
        watched.began(P, request, now=0.0)
        watched.answered(P, request, now=0.0)
        watched.ended(P, request, now=0.0)

    assert len(watched._answered) == legs._PROMISED
    assert not watched._open
    assert watched.began(D, RequestId("0"), now=1.0) is None
    assert watched.began(D, RequestId(str(3 * legs._PROMISED - 1)), now=1.0) == 1.0


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_the_table_has_no_holes_and_what_is_over_stays_over(state, event):
    """Watching must never be what breaks a request."""
    after = TRANSITIONS[state][event]

    assert after is State.OVER or (event is Event.ANSWER and after is State.ANSWERED)
    assert state is not State.OVER or after is State.OVER


@given(
    st.lists(
        st.tuples(st.sampled_from(["began", "answered", "ended"]), st.sampled_from([P, D]), st.sampled_from("abc")),
        max_size=40,
    )
)
def test_what_is_in_flight_is_what_began_and_has_not_ended(events):
    """In any order, also one that the relay would never make."""
    legs, expected = Legs(), set()
    for now, (what, instance, request) in enumerate(events):
        getattr(legs, what)(instance, RequestId(request), now=float(now))
        if what == "began":
            expected.add((instance.id, request))
        elif what == "ended":
            expected.discard((instance.id, request))

        assert legs.in_flight == Counter(name for name, _ in expected)
