"""Push into host memory: slots are lent in turn, what landed in them is copied, and they come back whatever happens."""

import itertools

import pytest

from support.engines import FINGERPRINT, LEASE, lent, rank_info
from support.push_engines import PATIENCE, WAIT
from xpyd_connector.core.counters import Counters
from xpyd_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId
from xpyd_connector.core.lease.decode_scheduler import LeaseRenewer
from xpyd_connector.core.lease.kv_params import PushParams
from xpyd_connector.core.messages import (
    MAX_PART,
    PROTOCOL,
    CancelPushes,
    CopyEnded,
    CopyIn,
    PushDone,
    PushStopped,
    RegisterPush,
    RenewLeases,
    Welcome,
    WorkerHello,
)
from xpyd_connector.core.ports import ConnectionLost, MessageReceived, PeerConnected
from xpyd_connector.core.push.decode_scheduler import QUARANTINE, PushOrder, PushReceiver
from xpyd_connector.core.results import BlocksReleased, LoadResult
from xpyd_connector.core.session.peers import PeerTable
from xpyd_connector.core.session.worker_links import WorkerLinks
from xpyd_connector.core.staging.decode_scheduler import StagingReceiver
from xpyd_connector.core.staging.slots import Slots

P, ADDRESS, T = EngineId("p0"), Address("10.0.0.1", 5600), RequestId("t")
A, B, C = RequestId("d-a"), RequestId("d-b"), RequestId("d-c")
W0, W1, STRANGER = ConnId(101), ConnId(102), ConnId(103)
TOKENS = {0: b"token 0", 1: b"token 1"}
SQUEEZE = 30.0


class Link:
    """Goes nowhere."""

    def __init__(self):
        self.sent, self.closed, self.conns = [], [], itertools.count(1)

    def connect(self, peer, engine):
        return ConnId(next(self.conns))

    def send(self, conn, message):
        self.sent.append((conn, message))

    def close(self, conn):
        self.closed.append(conn)


class Desk:
    """The control thread of a decode engine with two ranks and room for four blocks, and everybody it talks to."""

    def __init__(self, slots=4):
        self.link, self.counters, self.now = Link(), Counters(), 0.0
        self.peers = PeerTable(self.link, FINGERPRINT, self.counters, retry_after=1.0)
        self.lease_renewer = LeaseRenewer(self.link, self.peers, self.counters, heartbeat_interval=LEASE / 6)
        self.slots = Slots([slots])
        self.staging_receiver = StagingReceiver(self.link, self.counters, WorkerLinks(self.link, TOKENS), self.slots)
        ranks = [rank_info(f"d/{rank}", rank=rank, ranks=2) for rank in TOKENS]
        self.push_receiver = PushReceiver(
            self.link, self.peers, self.lease_renewer, self.counters, ranks,
            timeout=WAIT, peer_timeout=PATIENCE, contention_timeout=SQUEEZE, staging_receiver=self.staging_receiver,
        )  # fmt: skip
        for rank, conn in enumerate((W0, W1)):
            self.work(conn, WorkerHello(rank, TOKENS[rank], receives_pushes=True))

    def expect(self, request=A, blocks=(4, 5)):
        self.lease_renewer.start_renewing(request, PushParams(P, *ADDRESS, T, T), now=self.now)
        self.push_receiver.expect(PushOrder(request, T, P, ADDRESS, "digest", lent(2, blocks)), now=self.now)

    @property
    def conn(self):
        return next(iter(self.peers._peers.values())).conn

    def connect(self):
        self.happen(PeerConnected(self.conn, Welcome(PROTOCOL, P, FINGERPRINT, (rank_info("p"),))))

    def happen(self, event):
        changed = self.lease_renewer.on(event, now=self.now)
        if changed is not None:
            self.push_receiver.peer_changed(changed, now=self.now)

    def hear(self, *messages):
        for message in messages:
            assert self.push_receiver.on(self.conn, message)

    def work(self, conn, message):
        self.staging_receiver.on(MessageReceived(conn, message))

    def copied(self, *, reason=""):
        """Both workers have made the copies they were told."""
        for conn, message in self.said(CopyIn):
            self.work(conn, CopyEnded(message.number, reason))

    def said(self, kind):
        said = [(conn, message) for conn, message in self.link.sent if isinstance(message, kind)]
        self.link.sent = [each for each in self.link.sent if not isinstance(each[1], kind)]
        return said

    def turn(self, seconds=0.0):
        """Let time pass, in which P answers heartbeats."""
        for peer in self.peers._peers.values():
            peer.unanswered_since = None
        self.now += seconds
        self.push_receiver.advance(now=self.now)
        return self.push_receiver.take_results()

    def is_clean(self):
        return len(self.push_receiver) == len(self.staging_receiver) == len(self.slots) == self.slots.held == 0


@pytest.fixture
def desk():
    return Desk()


def registered(desk):
    return {message.reader: [each.blocks for each in message.groups] for _, message in desk.said(RegisterPush)}


def test_slots_are_lent_and_what_landed_is_copied_before_the_request_is_told(desk):
    """P hears of slots, the workers of the blocks that they belong in."""
    desk.expect()
    desk.connect()
    assert registered(desk) == {A: [(1, 2)]}
    desk.hear(PushDone(A, held=True))
    assert desk.turn() == []
    orders = desk.said(CopyIn)
    assert [(conn, m.slots, m.blocks) for conn, m in orders] == [(W0, ((1, 2),), ((4, 5),)), (W1, ((1, 2),), ((4, 5),))]
    desk.work(W0, CopyEnded(orders[0][1].number, ""))
    assert desk.turn() == []
    desk.work(W1, CopyEnded(orders[1][1].number, ""))

    assert desk.turn() == [LoadResult(A, "")]
    assert desk.is_clean()


def test_who_finds_no_room_waits_in_line(desk):
    """However small; the lease is renewed meanwhile, and no time of the wait counts."""
    for request, blocks in ((A, (1, 2, 3)), (B, (4, 5)), (C, (6,))):
        desk.expect(request, blocks)
    desk.connect()
    assert registered(desk) == {A: [(1, 2, 3)]}
    assert {message.requests for _, message in desk.said(RenewLeases)} == {(T,)}
    desk.hear(PushDone(A, held=True))
    desk.turn()
    desk.copied()

    assert desk.turn(seconds=SQUEEZE - 1) == [LoadResult(A, "")]
    assert registered(desk) == {B: [(1, 2)], C: [(3,)]}


def test_a_prompt_that_never_fits_fails_at_once(desk):
    """And P, who holds its blocks for it, hears that nobody wants them."""
    desk.expect(A, range(1, 6))
    desk.expect(B, (6,))

    (failed,) = desk.turn()
    assert failed.request == A
    assert not failed.quarantined
    assert "5 slots of KV cache group 0 are wanted; staging_blocks is 4" in failed.failure
    assert desk.counters.take().counters["loads_failed_staging"] == 1
    assert len(desk.push_receiver) == 1


def test_a_copy_that_fails_fails_the_request(desk):
    """On either rank; nothing of it lingers: both have answered."""
    desk.expect()
    desk.connect()
    desk.hear(PushDone(A, held=True))
    desk.copied(reason="cudaErrorIllegalAddress")

    (failed,) = desk.turn()
    assert failed == LoadResult(A, "it was not copied out of host memory: cudaErrorIllegalAddress")
    assert desk.is_clean()


@pytest.mark.parametrize("when", ["queued", "waiting", "registered", "copying"])
def test_an_abort_gives_the_slots_back_when_nobody_writes_into_them(desk, when):
    """The blocks are free at once, unless our own workers are just writing into them."""
    if when == "queued":
        desk.expect(B, (1, 2, 3))
    desk.expect()
    if when != "waiting":
        desk.connect()
    if when == "copying":
        desk.hear(PushDone(A, held=True))
    desk.push_receiver.stop(A)

    assert desk.turn() == [LoadResult(A, "the request was aborted", quarantined=when == "copying")]
    if when == "registered":
        assert [message for _, message in desk.said(CancelPushes)] == [CancelPushes((A,))]
        assert desk.slots.held == 2
        desk.hear(PushStopped(A, ""))
        assert desk.turn() == []  # nobody was told that blocks linger
    elif when == "copying":
        assert desk.slots.held == 2
        desk.copied()
        assert desk.turn() == [BlocksReleased(A)]
    if when == "queued":
        desk.push_receiver.stop(B)
        desk.hear(PushStopped(B, ""))
    assert desk.is_clean()


def test_a_dead_peer_keeps_the_slots_out_of_reach_for_a_while(desk):
    """What it had sent may still arrive: in slots, so the request's blocks are free."""
    desk.expect()
    desk.connect()
    desk.happen(ConnectionLost(desk.conn, "closed"))

    assert desk.turn() == [LoadResult(A, "10.0.0.1:5600 is gone: closed", quarantined=False)]
    assert desk.slots.held == 2
    every, looks = QUARANTINE
    for _ in range(looks):
        assert desk.turn(seconds=every) == []
    assert desk.is_clean()


def test_a_push_that_keeps_others_waiting_gives_way(desk):
    """P may not have begun it, because it holds the prefills that wait here: neither would ever go on."""
    desk.expect(A, (1, 2, 3))
    desk.connect()
    assert desk.turn(seconds=SQUEEZE) == []  # nobody waits
    desk.expect(B, (4, 5))
    (failed,) = desk.turn()
    assert failed.request == A
    assert "others wait for its slots" in failed.failure
    desk.hear(PushStopped(A, ""))
    desk.turn()

    assert registered(desk)[B] == [(1, 2)]


def test_a_long_prompt_is_copied_in_as_many_orders_as_one_message_may_name():
    """All of them must have ended."""
    desk = Desk(slots=2 * MAX_PART)
    blocks = range(1, MAX_PART + 2)
    desk.expect(A, blocks)
    desk.connect()
    desk.hear(PushDone(A, held=True))
    orders = desk.said(CopyIn)
    assert [len(message.blocks[0]) for _, message in orders] == [MAX_PART, MAX_PART, 1, 1]
    for conn, message in orders[:-1]:
        desk.work(conn, CopyEnded(message.number, ""))
    assert desk.turn() == []
    desk.work(orders[-1][0], CopyEnded(orders[-1][1].number, ""))

    assert desk.turn() == [LoadResult(A, "")]


def test_a_worker_that_comes_back_hears_what_it_owes(desk):
    """Its connection was lost, not its life; what it has answered, it is not asked again."""
    desk.expect()
    desk.connect()
    desk.hear(PushDone(A, held=True))
    (_, order), (_, same) = desk.said(CopyIn)
    assert order == same
    desk.work(W0, CopyEnded(order.number, ""))
    desk.staging_receiver.on(ConnectionLost(W1, "closed"))
    desk.work(STRANGER, WorkerHello(1, b"guessed", receives_pushes=True))
    assert desk.link.closed == [STRANGER]
    assert not desk.staging_receiver.is_worker(STRANGER)
    back = ConnId(104)
    desk.work(back, WorkerHello(1, TOKENS[1], receives_pushes=True))
    assert desk.said(CopyIn) == [(back, order)]
    desk.work(back, CopyEnded(order.number, ""))
    desk.work(back, CopyEnded(order.number, ""))

    assert desk.turn() == [LoadResult(A, "")]
    assert desk.counters.take().counters["unknown_transfer_messages"] == 1


def test_blocks_are_not_slots():
    """Ids of both are numbers: a request is told of blocks, P of slots."""
    desk = Desk()
    desk.expect(A, (BlockId(9),))
    desk.connect()

    assert registered(desk) == {A: [(1,)]}
