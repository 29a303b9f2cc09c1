"""How long blocks are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.ids import ConnId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseEvent, LeaseTable
from pdrelay_connector.core.messages import MAX_IDS
from pdrelay_connector.errors import IllegalTransition

A, B = RequestId("a"), RequestId("b")
READER, OTHER = RequestId("reader"), RequestId("other")
D, ELSE = ConnId(1), ConnId(2)


@pytest.fixture
def book():
    return LeaseTable(duration=30.0, extension=20.0)


def test_a_lease_is_granted_once(book):
    """Two grants would free the blocks twice."""
    book.grant(A, now=0.0)

    with pytest.raises(IllegalTransition, match="twice"):
        book.grant(A, now=1.0)


def test_a_lease_ends_exactly_when_it_says(book):
    """The thread sleeps until next_expiry: at that moment the lease must be over, or it would spin."""
    book.grant(A, now=5.0)
    due = book.next_expiry()

    assert due == 35.0
    assert book.expire(now=due - 0.001) == []
    assert book.expire(now=due) == [LeaseEnded(A, LeaseEvent.EXPIRED)]
    assert book.next_expiry() is None


def test_a_renewal_never_shortens(book):
    """The extension is shorter than the lease: an early heartbeat must not cost 10 s."""
    book.grant(A, now=0.0)
    book.renew(A, D, now=1.0)
    assert book.next_expiry() == 30.0
    book.renew(A, D, now=11.0)

    assert book.next_expiry() == 31.0


@pytest.mark.parametrize("late", [30.0, 30.1, 1000.0])
def test_a_renewal_that_is_seen_late_keeps_what_has_not_expired_yet(book, late):
    """Blocks are held until the table says that the lease has expired; afterwards nothing revives it."""
    book.grant(A, now=0.0)

    assert book.renew(A, D, now=late)
    assert book.expire(now=late) == []
    assert book.expire(now=late + 20.0) == [LeaseEnded(A, LeaseEvent.EXPIRED)]
    assert not book.renew(A, D, now=late + 20.0)


def test_an_engine_that_connects_again_keeps_its_leases():
    """It has proven to be the same, and the old connection is not noticed to be gone yet."""
    book = LeaseTable(duration=30.0, extension=20.0, same_engine=lambda one, other: {one, other} == {D, ELSE})
    book.grant(A, now=0.0)
    book.renew(A, D, now=0.0)
    assert book.renew(A, ELSE, now=1.0)
    assert not book.renew(A, ConnId(3), now=1.0)

    assert book.lose(D) == []
    assert book.lose(ELSE) == [LeaseEnded(A, LeaseEvent.PEER_LOST)]


def test_without_proven_engines_any_connection_may_say_that_a_lease_is_over(book):
    """A decode engine's workers read over connections of their own, and nothing tells whose they are."""
    book.grant(A, now=0.0)
    book.renew(A, D, now=0.0)

    assert book.may_end(A, ELSE)


def test_ranks_of_two_readers_do_not_add_up(book):
    """Two answers to one prompt share its lease: half of each is not one whole read."""
    book.grant(A, now=0.0)

    assert book.done(A, READER, 0, 2) is None
    assert book.done(A, OTHER, 1, 2) is None
    assert book.done(A, READER, 1, 2) == LeaseEnded(A, LeaseEvent.DONE)


def test_a_lease_remembers_a_bounded_number_of_readers(book):
    """A peer that invents readers must not fill our memory."""
    book.grant(A, now=0.0)
    for number in range(MAX_IDS + 10):
        book.done(A, RequestId(f"r{number}"), 0, 2)

    assert len(book._leases[A].ranks_done) == MAX_IDS
    assert book.done(A, RequestId("r0"), 1, 2) == LeaseEnded(A, LeaseEvent.DONE)


REQUESTS = st.sampled_from([RequestId(name) for name in "abcd"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), REQUESTS),
        st.tuples(st.just("renew"), REQUESTS, st.sampled_from([D, ELSE])),
        st.tuples(st.just("done"), REQUESTS, st.integers(0, 1)),
        st.tuples(st.just("drop"), REQUESTS),
        st.tuples(st.just("revoke"), REQUESTS),
        st.tuples(st.just("lose"), st.sampled_from([D, ELSE])),
        st.tuples(st.just("wait"), st.floats(0, 40)),
    ),
    max_size=40,
)


@given(STEPS)
def test_every_lease_ends_exactly_once(steps):
    """Whatever happens in whatever order: not never (blocks lost) and not twice (others' blocks freed)."""
    book = LeaseTable(duration=30.0, extension=20.0)
    now = 0.0
    granted = []
    released = []
    for number, (step, *args) in enumerate(steps):
        released += book.expire(now=now)
        match step:
            case "grant" if args[0] not in book:
                book.grant(args[0], now=now)
                granted.append(args[0])
            case "renew":
                is_ours = args[0] in book and book.holder(args[0]) in (None, args[1])
                assert book.renew(*args, now=now) == is_ours
            case "revoke" if args[0] in book:
                released.append(book.end(args[0], LeaseEvent.REVOKED))
            case "done" if args[0] in book and (end := book.done(args[0], READER, args[1], 2)):
                released.append(end)
            case "drop" if args[0] in book:
                released.append(book.end(args[0], LeaseEvent.DROPPED))
            case "lose":
                released += book.lose(args[0])
            case "wait":
                now += args[0]
        assert len(granted) == len(released) + len(book), (number, step)
    released += book.expire(now=now + 60.0)

    assert sorted(granted) == sorted(request for request, _ in released)
    assert len(book) == len(book._deadlines) == len(book._by_holder) == 0
