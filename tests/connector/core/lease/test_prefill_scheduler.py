"""Lending: the rules that the stories of ``pull/test_pull_pair.py`` do not show."""

import pytest

from support.engines import HELLO
from support.recording_link import RecordingLink
from xpyd_connector.core.counters import Counters
from xpyd_connector.core.ids import ConnId, RequestId
from xpyd_connector.core.lease.lease_table import LeaseEvent, LeaseTable
from xpyd_connector.core.lease.prefill_scheduler import LeaseManager, RevocableLease
from xpyd_connector.core.messages import (
    MAX_IDS,
    Challenge,
    DropLeases,
    FenceResult,
    LeasesLost,
    ReadDone,
    ReadsStarted,
    RenewLeases,
)
from xpyd_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived

A, B, READER = RequestId("a"), RequestId("b"), RequestId("reader")
D, ELSE, WORKER = ConnId(1), ConnId(2), ConnId(3)


class Shop:
    """D has two connections, and has proven it."""

    def __init__(self):
        self.link, self.counters = RecordingLink(), Counters()
        leases = LeaseTable(
            duration=30.0, extension=20.0, reading=10.0, same_engine=lambda one, other: {one, other} <= {D, WORKER}
        )
        self.lease_manager = LeaseManager(self.link, leases, self.counters)

    def hear(self, message, conn=D, now=0.0):
        self.lease_manager.on(MessageReceived(conn, message), now=now)

    def released(self):
        return [(request, why.name) for request, why in self.lease_manager.take_released()]

    def counted(self):
        return self.counters.take().counters


@pytest.fixture
def shop():
    shop = Shop()
    shop.lease_manager.grant(A, now=0.0)
    shop.lease_manager.grant(B, now=0.0)
    shop.counters.take()
    return shop


def test_a_renewal_of_what_is_gone_is_answered(shop):
    """And only that is named."""
    gone = RequestId("gone")
    shop.hear(RenewLeases((A, gone)))

    assert shop.link.sent == [(D, LeasesLost((gone,)))]
    assert shop.counted() == {"leases_renewed": 1, "unknown_transfer_messages": 1}


def test_a_read_counts_only_if_the_lease_held_when_it_was_reported(shop):
    """Answered before the blocks are released, and to whoever asked."""
    shop.hear(ReadDone(A, READER, 0, 1))
    shop.hear(ReadDone(A, READER, 0, 1), conn=ELSE)

    assert shop.link.sent == [(D, FenceResult(READER, held=True)), (ELSE, FenceResult(READER, held=False))]
    assert shop.released() == [("a", "DONE")]


def test_a_read_reported_when_its_lease_is_due_does_not_count(shop):
    """Even if nobody has looked at the clock since: the blocks are as good as given away."""
    shop.hear(ReadDone(A, READER, 0, 1), now=30.0)

    assert shop.link.sent == [(D, FenceResult(READER, held=False))]
    assert shop.released() == [("a", "EXPIRED"), ("b", "EXPIRED")]


def test_what_is_dropped_twice_ends_once(shop):
    """In one message, in two, and for a request that was never here."""
    shop.hear(DropLeases((A, A, RequestId("gone"))))
    shop.hear(DropLeases((A,)))

    assert shop.released() == [("a", "DROPPED")]
    assert shop.counted() == {"leases_dropped": 1, "unknown_transfer_messages": 2}


@pytest.mark.parametrize("message", [HELLO, Challenge(4, b""), FenceResult(READER, held=True), LeasesLost((A,))])
def test_a_message_of_the_wrong_role_closes_the_connection(shop, message):
    """A second hello, or a prefill engine's words: and what he held is free."""
    shop.hear(RenewLeases((A,)))
    shop.hear(message)

    assert shop.link.closed == [D]
    assert shop.released() == [("a", "PEER_LOST")]


def test_a_lost_connection_frees_what_was_claimed_over_it(shop):
    """At once, and each lease once."""
    shop.hear(RenewLeases((A, B)))
    shop.lease_manager.on(ConnectionLost(D, "gone"), now=0.0)
    shop.lease_manager.on(ConnectionLost(D, "gone"), now=0.0)

    assert shop.released() == [("a", "PEER_LOST"), ("b", "PEER_LOST")]
    assert shop.counted() == {"leases_renewed": 2, "leases_peer_lost": 2}


def test_news_of_connections_we_opened_are_not_the_lenders(shop):
    """They change nothing."""
    shop.lease_manager.on(ConnectFailed(D, "no route"), now=0.0)

    assert shop.released() == shop.link.sent == shop.link.closed == []


def test_the_thread_sleeps_until_the_first_lease_ends(shop):
    """Nothing else needs it."""
    shop.hear(RenewLeases((A,)), now=15.0)

    assert shop.lease_manager.advance(now=15.0) == 30.0
    assert shop.lease_manager.advance(now=30.0) == 35.0
    assert shop.lease_manager.advance(now=35.0) is None
    assert shop.released() == [("b", "EXPIRED"), ("a", "EXPIRED")]


# ---- whose lease it is


def test_a_renewal_of_anothers_lease_is_answered_like_an_unknown_one(shop):
    """And does not tell which of the two it is."""
    shop.hear(RenewLeases((A,)))
    shop.hear(RenewLeases((A, B)), conn=ELSE)

    assert shop.link.sent == [(ELSE, LeasesLost((A,)))]
    assert shop.counted() == {"leases_renewed": 2, "foreign_messages": 1}


def test_a_read_of_anothers_lease_does_not_count_and_ends_nothing(shop):
    """Whoever knows a request's name could have its blocks freed under the engine that reads them."""
    shop.hear(RenewLeases((A,)))
    shop.hear(ReadDone(A, READER, 0, 1), conn=ELSE)
    shop.hear(DropLeases((A,)), conn=ELSE)
    assert shop.released() == []
    shop.hear(ReadDone(A, READER, 0, 1), conn=WORKER)

    assert shop.link.sent == [(ELSE, FenceResult(READER, held=False)), (WORKER, FenceResult(READER, held=True))]
    assert shop.released() == [("a", "DONE")]
    assert shop.counted()["foreign_messages"] == 2


def test_a_worker_may_drop_what_its_scheduler_holds(shop):
    """A read that failed is given up over the worker's own connection."""
    shop.hear(RenewLeases((A,)))
    shop.hear(DropLeases((A,)), conn=WORKER)

    assert shop.released() == [("a", "DROPPED")]


def test_an_unclaimed_lease_accepts_any_engine(shop):
    """The first word may come over any connection of a decode engine."""
    shop.hear(DropLeases((A,)), conn=ELSE)

    assert shop.released() == [("a", "DROPPED")]


# ---- leases that are revoked


def revoke(shop, *requests, blocks=1, now=0.0, **options):
    shop.lease_manager.revoke([RevocableLease(request, 1) for request in requests], blocks, now=now, **options)


def test_no_more_is_revoked_than_is_lacking(shop):
    """In the order in which they are named."""
    revoke(shop, RequestId("gone"), B, A)

    assert shop.released() == [("b", "REVOKED")]


@pytest.mark.parametrize("word", [ReadsStarted((A,)), ReadDone(A, READER, 0, 2)], ids=["reads", "has read in part"])
def test_what_is_read_is_not_revoked_for_a_while(shop, word):
    """The request would fail for it. But a reader that vanishes keeps its blocks no longer than a read may take."""
    shop.hear(RenewLeases((A,)))
    shop.hear(word, conn=WORKER)
    revoke(shop, A, now=9.9)
    assert shop.released() == []
    revoke(shop, A, now=10.0)

    assert shop.released() == [("a", "REVOKED")]


def test_what_another_part_is_busy_with_is_not_revoked(shop):
    """It is written to somebody, or staged for somebody."""
    revoke(shop, A, B, is_busy=lambda request: request == A)

    assert shop.released() == [("b", "REVOKED")]


def test_another_engines_read_does_not_protect_a_lease(shop):
    """Nor one that is over."""
    shop.hear(RenewLeases((A,)))
    shop.hear(ReadsStarted((A, RequestId("gone"))), conn=ELSE)
    revoke(shop, A)

    assert shop.released() == [("a", "REVOKED")]
    assert shop.counted()["foreign_messages"] == 1


def test_very_many_lost_leases_are_reported_in_pieces():
    """One frame has a limit."""
    shop = Shop()
    names = tuple(RequestId(f"r{number}") for number in range(MAX_IDS + 1))
    shop.hear(RenewLeases(names))

    assert [len(message.requests) for _, message in shop.link.sent] == [MAX_IDS, 1]


def test_every_end_of_a_lease_is_counted():
    """One counter each."""
    from xpyd_connector.core.lease.prefill_scheduler import _COUNTER

    assert set(_COUNTER) == set(LeaseEvent) - {LeaseEvent.RENEWED}
