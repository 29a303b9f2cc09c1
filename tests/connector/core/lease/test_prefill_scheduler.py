"""Lending: the rules that the stories of ``pull/test_pull_pair.py`` do not show."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import ConnId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEvent, LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import MAX_WAITING, LeaseManager, RevocableLease
from pdrelay_connector.core.messages import (
    MAX_IDS,
    Challenge,
    DropLeases,
    FenceResult,
    LeasesLost,
    RankSums,
    ReadDone,
    ReadsStarted,
    RenewLeases,
)
from pdrelay_connector.core.ports import ConnectionLost, MessageReceived
from support.engines import HELLO
from support.recording_link import RecordingLink

A = RequestId("a")
B = RequestId("b")
READER = RequestId("reader")
D = ConnId(1)
ELSE = ConnId(2)
WORKER = ConnId(3)


class Shop:
    """D has two connections, and has proven it."""

    def __init__(self):
        self.link, self.counters = RecordingLink(), Counters()
        self.closed = set()
        leases = LeaseTable(
            duration=30.0,
            extension=20.0,
            reading=10.0,
            same_engine=lambda one, other: {one, other} <= {D, WORKER} - self.closed,
        )
        self.lease_manager = LeaseManager(self.link, leases, self.counters)

    def hear(self, message, conn=D, now=0.0):
        self.lease_manager.on(MessageReceived(conn, message), now=now)

    def close(self, conn, now=0.0):
        self.closed.add(conn)
        self.lease_manager.on(ConnectionLost(conn, "it closed"), now=now)

    def released(self):
        return [(request, why.name) for request, why in self.lease_manager.take_released()]


@pytest.fixture
def shop():
    shop = Shop()
    shop.lease_manager.grant(A, now=0.0)
    shop.lease_manager.grant(B, now=0.0)
    shop.counters.take_report()
    return shop


def test_a_read_reported_when_its_lease_is_due_does_not_count(shop):
    """Even if nobody has looked at the clock since: the blocks are as good as given away."""
    shop.hear(ReadDone(A, READER, 0, 1), now=30.0)

    assert shop.link.sent == [(D, FenceResult(READER, held=False))]
    assert shop.released() == [("a", "EXPIRED"), ("b", "EXPIRED")]


@pytest.mark.parametrize("message", [HELLO, Challenge(4, b""), FenceResult(READER, held=True), LeasesLost((A,))])
def test_a_message_of_the_wrong_role_closes_the_connection(shop, message):
    """A second hello, or a prefill engine's words: and what he held is free."""
    shop.hear(RenewLeases((A,)))
    shop.hear(message)

    assert shop.link.closed == [D]
    assert shop.released() == [("a", "PEER_LOST")]


def test_the_thread_sleeps_until_the_first_lease_ends(shop):
    """Nothing else needs it."""
    shop.hear(RenewLeases((A,)), now=15.0)

    assert shop.lease_manager.advance(now=15.0) == 30.0
    assert shop.lease_manager.advance(now=30.0) == 35.0
    assert shop.lease_manager.advance(now=35.0) is None
    assert shop.released() == [("b", "EXPIRED"), ("a", "EXPIRED")]


# ---- whose lease it is


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


def test_very_many_lost_leases_are_reported_in_pieces():
    """One frame has a limit."""
    shop = Shop()
    names = tuple(RequestId(f"r{number}") for number in range(MAX_IDS + 1))
    shop.hear(RenewLeases(names))

    assert [len(message.requests) for _, message in shop.link.sent] == [MAX_IDS, 1]


def test_every_end_of_a_lease_is_counted():
    """One counter each."""
    from pdrelay_connector.core.lease.prefill_scheduler import _COUNTER

    assert set(_COUNTER) == set(LeaseEvent) - {LeaseEvent.RENEWED}


# ---- leases whose checksums are not there yet

S = RequestId("s")
SUMS = RankSums(0, "shape", ())


@pytest.fixture
def sampled(shop):
    shop.lease_manager.grant(S, now=0.0, sampled=True)
    shop.hear(RenewLeases((S,)))
    shop.counters.take_report()
    return shop


def waiting(shop):
    return len(shop.lease_manager._sampled[S].waiting)


def test_a_reader_that_repeats_itself_waits_once(sampled):
    """A peer that never stops would fill the memory."""
    for _ in range(10):
        sampled.hear(ReadDone(S, READER, 0, 2), conn=WORKER)
    assert waiting(sampled) == 1
    sampled.lease_manager.add_sums(S, [SUMS], now=1.0)

    assert sampled.link.sent == [(WORKER, FenceResult(READER, held=True, sums=SUMS))]


def test_of_very_many_readers_some_do_not_wait(sampled):
    """They are answered as if the lease were not sampled."""
    for number in range(MAX_WAITING + 1):
        sampled.hear(ReadDone(S, RequestId(f"reader {number}"), 0, 2), conn=WORKER)

    assert waiting(sampled) == MAX_WAITING
    assert sampled.link.sent == [(WORKER, FenceResult(RequestId(f"reader {MAX_WAITING}"), held=True))]


@pytest.mark.parametrize("end", ["its checksums come", "they come too late"])
def test_what_a_lost_reader_has_read_counts(sampled, end):
    """It is no other engine's message, nobody is answered, and the lease ends with the last rank."""
    sampled.hear(ReadDone(S, READER, 0, 2), conn=WORKER)
    sampled.hear(ReadDone(S, READER, 1, 2), conn=D)
    sampled.close(WORKER)
    if end == "its checksums come":
        sampled.lease_manager.add_sums(S, [SUMS], now=1.0)
    else:
        sampled.lease_manager.advance(now=5.0)

    assert [conn for conn, _ in sampled.link.sent] == [D]
    assert sampled.released() == [("s", "DONE")]
    assert "foreign_messages" not in sampled.counters.take_report().counters


def test_all_who_have_waited_have_read_in_time(sampled):
    """The first one's end of the lease is no wrong for the others: their reads ended before it."""
    for reader in "xy":
        sampled.hear(ReadDone(S, RequestId(reader), 0, 1), conn=WORKER)
    sampled.lease_manager.add_sums(S, [SUMS], now=1.0)

    assert [message.held for _, message in sampled.link.sent] == [True, True]
    assert sampled.released() == [("s", "DONE")]


def test_the_thread_wakes_for_readers_that_have_waited_too_long(sampled):
    """No message may come until then. Neither a second reader nor a repetition prolongs the wait."""
    sampled.hear(ReadDone(S, READER, 0, 2), conn=WORKER, now=1.0)
    sampled.hear(ReadDone(S, READER, 0, 2), conn=WORKER, now=2.0)
    sampled.hear(ReadDone(S, READER, 1, 2), conn=WORKER, now=4.0)

    assert sampled.lease_manager.advance(now=4.0) == 6.0
    sampled.lease_manager.advance(now=6.0)
    assert sampled.released() == [("s", "DONE")]
