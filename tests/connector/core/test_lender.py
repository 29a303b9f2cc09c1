"""Lending: the rules that the stories of ``test_pair.py`` do not show."""

import pytest

from support.engines import HELLO
from xpyd_connector.core.ids import ConnId, RequestId
from xpyd_connector.core.leases import LeaseBook, LeaseEvent
from xpyd_connector.core.lender import Lender
from xpyd_connector.core.messages import MAX_IDS, Challenge, Done, Drop, Fenced, Lapsed, Renew
from xpyd_connector.core.ports import Failed, Lost, Received
from xpyd_connector.core.tally import Tally

A, B, READER = RequestId("a"), RequestId("b"), RequestId("reader")
D, ELSE = ConnId(1), ConnId(2)


class Recorder:
    """A link that goes nowhere."""

    def __init__(self):
        self.sent, self.closed = [], []

    def send(self, conn, message):
        self.sent.append((conn, message))

    def close(self, conn):
        self.closed.append(conn)


class Shop:
    def __init__(self):
        self.link, self.tally = Recorder(), Tally()
        self.lender = Lender(self.link, LeaseBook(duration=30.0, extension=20.0), self.tally)

    def hear(self, message, conn=D, now=0.0):
        self.lender.on(Received(conn, message), now=now)

    def released(self):
        return [(request, why.name) for request, why in self.lender.take_released()]

    def counters(self):
        return self.tally.take().counters


@pytest.fixture
def shop():
    shop = Shop()
    shop.lender.grant(A, now=0.0)
    shop.lender.grant(B, now=0.0)
    shop.tally.take()
    return shop


def test_a_renewal_of_what_is_gone_is_answered(shop):
    """And only that is named."""
    gone = RequestId("gone")
    shop.hear(Renew((A, gone)))

    assert shop.link.sent == [(D, Lapsed((gone,)))]
    assert shop.counters() == {"leases_renewed": 1, "late_notifications": 1}


def test_a_renewal_of_what_is_held_is_not_answered(shop):
    """The common case costs nothing."""
    shop.hear(Renew((A, B)))

    assert shop.link.sent == []


def test_a_read_counts_only_if_the_lease_held_when_it_was_told(shop):
    """Answered before the blocks are released, and to whoever asked."""
    shop.hear(Done(A, READER, 0, 1))
    shop.hear(Done(A, READER, 0, 1), conn=ELSE)

    assert shop.link.sent == [(D, Fenced(READER, held=True)), (ELSE, Fenced(READER, held=False))]
    assert shop.released() == [("a", "DONE")]


def test_a_read_that_is_told_when_its_lease_is_due_does_not_count(shop):
    """Even if nobody has looked at the clock since: the blocks are as good as given away."""
    shop.hear(Done(A, READER, 0, 1), now=30.0)

    assert shop.link.sent == [(D, Fenced(READER, held=False))]
    assert shop.released() == [("a", "EXPIRED"), ("b", "EXPIRED")]


def test_each_rank_is_told_whether_its_own_read_counts(shop):
    """The lease ends with the last one."""
    shop.hear(Done(A, READER, 0, 2))
    assert shop.released() == []
    shop.hear(Done(A, READER, 1, 2))

    assert shop.link.sent == [(D, Fenced(READER, held=True))] * 2
    assert shop.released() == [("a", "DONE")]


def test_what_is_dropped_twice_ends_once(shop):
    """In one message, in two, and for a request that was never here."""
    shop.hear(Drop((A, A, RequestId("gone"))))
    shop.hear(Drop((A,)))

    assert shop.released() == [("a", "DROPPED")]
    assert shop.counters() == {"leases_dropped": 1, "late_notifications": 2}


@pytest.mark.parametrize("message", [HELLO, Challenge(4, b""), Fenced(READER, held=True), Lapsed((A,))])
def test_whoever_says_what_is_not_his_to_say_is_sent_away(shop, message):
    """A second hello, or a prefill engine's words: and what he held is free."""
    shop.hear(Renew((A,)))
    shop.hear(message)

    assert shop.link.closed == [D]
    assert shop.released() == [("a", "PEER_LOST")]


def test_a_lost_connection_frees_what_was_claimed_over_it(shop):
    """At once, and each lease once."""
    shop.hear(Renew((A, B)))
    shop.lender.on(Lost(D, "gone"), now=0.0)
    shop.lender.on(Lost(D, "gone"), now=0.0)

    assert shop.released() == [("a", "PEER_LOST"), ("b", "PEER_LOST")]
    assert shop.counters() == {"leases_renewed": 2, "leases_peer_lost": 2}


def test_news_of_connections_we_opened_are_not_the_lenders(shop):
    """They change nothing."""
    shop.lender.on(Failed(D, "no route"), now=0.0)

    assert shop.released() == shop.link.sent == shop.link.closed == []


def test_the_thread_sleeps_until_the_first_lease_ends(shop):
    """Nothing else needs it."""
    shop.hear(Renew((A,)), now=15.0)

    assert shop.lender.advance(now=15.0) == 30.0
    assert shop.lender.advance(now=30.0) == 35.0
    assert shop.lender.advance(now=35.0) is None
    assert shop.released() == [("b", "EXPIRED"), ("a", "EXPIRED")]


def test_very_many_lapsed_leases_are_told_in_pieces():
    """One frame has a limit."""
    shop = Shop()
    names = tuple(RequestId(f"r{number}") for number in range(MAX_IDS + 1))
    shop.hear(Renew(names))

    assert [len(message.requests) for _, message in shop.link.sent] == [MAX_IDS, 1]


def test_every_end_of_a_lease_is_counted():
    """One counter each."""
    from xpyd_connector.core.lender import _COUNTER

    assert set(_COUNTER) == set(LeaseEvent) - {LeaseEvent.RENEWED}
