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
from xpyd_connector.core.ports import MessageReceived

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


@pytest.fixture
def shop():
    shop = Shop()
    shop.lease_manager.grant(A, now=0.0)
    shop.lease_manager.grant(B, now=0.0)
    shop.counters.take()
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
    from xpyd_connector.core.lease.prefill_scheduler import _COUNTER

    assert set(_COUNTER) == set(LeaseEvent) - {LeaseEvent.RENEWED}
