"""Who is admitted at once is exactly who would be admitted on arrival, and counts the same."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.admission import Admission, State
from xpyd_proxy.core.limits import Bucket, Limits

RATES = st.sampled_from([None, None, 0.5, 2.0, 7.0])
LIMITS = st.builds(
    Limits,
    concurrency=st.sampled_from([None, 1, 2, 3]),
    queue=st.integers(0, 2),
    wait_s=st.sampled_from([0.0, 1.0, 3.0]),
    held_bytes=st.sampled_from([None, None, 0, 10, 25]),
    rate=RATES,
    key_concurrency=st.sampled_from([None, None, 1, 2]),
    key_rate=RATES,
)
KEYS = st.sampled_from("abc")
COMES = st.tuples(st.sampled_from(["arrive", "admit"]), KEYS, st.integers(0, 2), st.sampled_from([0, 1, 10, 11]))
STEPS = st.one_of(
    COMES,
    COMES,
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 0.5, 1.0, 2.5])),
    st.tuples(st.just("change"), LIMITS),
)


def counts(admission, now):
    """Return all that later requests depend on; an account that says nothing is as good as none."""
    accounts = {
        key: (one.held, fullness(one.bucket, now))
        for key, one in admission._accounts.items()
        if one.held or not one.bucket.is_full(now=now)
    }
    return (
        admission.admitted,
        admission.waiting,
        admission.held_bytes,
        dict(admission.refused),
        fullness(admission._bucket, now),
        accounts,
        {priority: [ticket.key for ticket in lane] for priority, lane in admission._lanes.items()},
        [(ticket.key, ticket.state) for ticket in admission._changed],
    )


def fullness(bucket: Bucket, now):
    return bucket.wait(0.01, now=now)


def admit(admission, key, priority, size, now):
    """Compare the two ways at one moment; return the ticket, if there is one."""
    other = copy.deepcopy(admission)
    arrived = other.arrive(key, priority, size, now=now)
    before = counts(admission, now)
    ticket = admission.admit(key, size, now=now)

    assert (ticket is not None) == (arrived.state is State.ADMITTED)
    if ticket is None:
        assert counts(admission, now) == before
    else:
        assert (ticket.state, ticket.key, ticket.size) == (State.ADMITTED, key, size)
        assert counts(admission, now) == counts(other, now)
    return ticket


@given(LIMITS, st.lists(STEPS, max_size=20), COMES)
def test_to_admit_is_to_arrive_where_nobody_has_to_wait(limits, steps, last):
    """Under all limits, whatever has happened before; None counts nothing."""
    admission, here, now = Admission(limits), [], 0.0
    for step in [*steps, ("admit", *last[1:])]:
        match step:
            case ("arrive", key, priority, size):
                here.append(admission.arrive(key, priority, size, now=now))
            case ("admit", key, priority, size):
                here.append(admit(admission, key, priority, size, now))
            case ("leave", place) if here:
                admission.leave(here[place % len(here)])
            case ("wait", seconds):
                now += seconds
                admission.expire(now=now)
            case ("change", limits):
                admission.change(limits)
        here = [ticket for ticket in here if ticket is not None and ticket.state in (State.ADMITTED, State.WAITING)]

    for ticket in here:
        admission.leave(ticket)
    assert (admission.admitted, admission.waiting, admission.held_bytes) == (0, 0, 0)


def test_a_place_that_was_given_at_once_goes_to_one_that_waits():
    """When its request is over."""
    admission = Admission(Limits(concurrency=1, queue=1, wait_s=9.0))
    first = admission.admit("a", 5, now=0.0)
    assert first is not None
    assert admission.admit("a", 5, now=0.0) is None
    second = admission.arrive("b", 0, 5, now=0.0)
    assert second.state is State.WAITING

    admission.leave(first)
    assert admission.poll() == [second]
    assert second.state is State.ADMITTED
    assert admission.admit("a", 5, now=0.0) is None


def test_accounts_of_keys_that_were_sent_on_do_not_pile_up():
    """Each of them has arrived at most to be told that it has to wait."""
    admission = Admission(Limits(concurrency=0, key_rate=5.0))
    for number in range(500):
        assert admission.admit(f"k{number}", 1, now=float(number)) is None

    assert len(admission._accounts) <= 1


@pytest.mark.parametrize("limits", [Limits(), Limits(rate=1.0, key_rate=1.0, concurrency=2, held_bytes=10)])
def test_what_is_taken_back_was_never_there(limits):
    """A request that has to go another way arrives there for the first time."""
    admission = Admission(limits)
    before = counts(admission, 5.0)
    ticket = admission.admit("a", 5, now=5.0)
    assert ticket is not None

    admission.take_back(ticket)
    assert counts(admission, 5.0) == before
    assert admission.arrive("a", 0, 5, now=5.0).state is State.ADMITTED
