"""Push into host memory: slots are lent in turn, what landed in them is copied, and they come back whatever happens."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import ConnId, EngineId, RequestId
from pdrelay_connector.core.messages import (
    MAX_PART,
    CancelPushes,
    CopyEnded,
    CopyIn,
    PushDone,
    PushStopped,
    RegisterPush,
    RenewLeases,
    WorkerHello,
)
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived
from pdrelay_connector.core.push.lost_peer import QUARANTINE
from pdrelay_connector.core.results import BlocksReleased, LoadResult
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.decode_scheduler import StagingReceiver
from pdrelay_connector.core.staging.slots import Slots
from support.expecting import ADDRESS, A, B, ExpectingEngine, T
from support.push_engines import WAIT
from support.recording_link import ConnectingLink

C = RequestId("d-c")
W0 = ConnId(101)
W1 = ConnId(102)
STRANGER = ConnId(103)
TOKENS = {0: b"token 0", 1: b"token 1"}
SQUEEZE = 30.0


class Harness(ExpectingEngine):
    """One that has host memory for four blocks, and everybody it talks to."""

    def __init__(self, slots=4):
        link = ConnectingLink()
        counters = Counters()
        self.slots = Slots([slots])
        self.staging_receiver = StagingReceiver(link, counters, WorkerLinks(link, TOKENS), self.slots)
        super().__init__(link, counters, contention_timeout=SQUEEZE, staging_receiver=self.staging_receiver)
        for rank, conn in enumerate((W0, W1)):
            self.work(conn, WorkerHello(rank, TOKENS[rank], receives_pushes=True))

    def hear(self, *messages):
        for message in messages:
            assert self.push_receiver.on(self.conn, message)

    def work(self, conn, message):
        self.staging_receiver.on(MessageReceived(conn, message))

    def copied(self, *, reason=""):
        """Both workers have made the copies they were told."""
        for conn, message in self.take_sent(CopyIn):
            self.work(conn, CopyEnded(message.number, reason))

    def take_sent(self, kind):
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
        return len(self.push_receiver) == len(self.staging_receiver) == len(self.slots) == self.slots.granted == 0


@pytest.fixture
def harness():
    return Harness()


def registered(harness):
    return {message.reader: [each.blocks for each in message.groups] for _, message in harness.take_sent(RegisterPush)}


def test_slots_are_granted_and_pushed_blocks_copied_before_the_load_ends(harness):
    """P hears of slots, the workers of the blocks that they belong in."""
    harness.expect()
    harness.connect()
    assert registered(harness) == {A: [(1, 2)]}
    harness.hear(PushDone(A, held=True))
    assert harness.turn() == []
    orders = harness.take_sent(CopyIn)
    assert [(conn, m.slots, m.blocks) for conn, m in orders] == [(W0, ((1, 2),), ((4, 5),)), (W1, ((1, 2),), ((4, 5),))]
    harness.work(W0, CopyEnded(orders[0][1].number, ""))
    assert harness.turn() == []
    harness.work(W1, CopyEnded(orders[1][1].number, ""))

    assert harness.turn() == [LoadResult(A, "")]
    assert harness.is_clean()


def test_who_finds_no_room_waits_in_line(harness):
    """However small; the lease is renewed meanwhile, and no time of the wait counts."""
    for request, blocks in ((A, (1, 2, 3)), (B, (4, 5)), (C, (6,))):
        harness.expect(request, blocks)
    harness.connect()
    assert registered(harness) == {A: [(1, 2, 3)]}
    assert {message.requests for _, message in harness.take_sent(RenewLeases)} == {(T,)}
    harness.hear(PushDone(A, held=True))
    harness.turn()
    harness.copied()

    assert harness.turn(seconds=SQUEEZE - 1) == [LoadResult(A, "")]
    assert registered(harness) == {B: [(1, 2)], C: [(3,)]}


def test_a_prompt_that_never_fits_fails_at_once(harness):
    """And P, who holds its blocks for it, hears that nobody wants them."""
    harness.expect(A, range(1, 6))
    harness.expect(B, (6,))

    (failed,) = harness.turn()
    assert failed.request == A
    assert not failed.quarantined
    assert "5 slots of KV cache group 0 are wanted; staging_blocks is 4" in failed.failure
    assert harness.counters.take_report().counters["loads_failed_staging"] == 1
    assert len(harness.push_receiver) == 1


def test_a_copy_that_fails_fails_the_request(harness):
    """On either rank; nothing of it lingers: both have answered."""
    harness.expect()
    harness.connect()
    harness.hear(PushDone(A, held=True))
    harness.copied(reason="cudaErrorIllegalAddress")

    (failed,) = harness.turn()
    assert failed == LoadResult(A, "it was not copied out of host memory: cudaErrorIllegalAddress")
    assert harness.is_clean()


@pytest.mark.parametrize("when", ["queued", "waiting", "registered", "copying"])
def test_an_abort_frees_the_slots_when_no_write_is_left(harness, when):
    """The blocks are free at once, unless our own workers are just writing into them."""
    if when == "queued":
        harness.expect(B, (1, 2, 3))
    harness.expect()
    if when != "waiting":
        harness.connect()
    if when == "copying":
        harness.hear(PushDone(A, held=True))
    harness.push_receiver.stop(A)

    assert harness.turn() == [LoadResult(A, "the request was aborted", quarantined=when == "copying")]
    if when == "registered":
        assert [message for _, message in harness.take_sent(CancelPushes)] == [CancelPushes((A,))]
        assert harness.slots.granted == 2
        harness.hear(PushStopped(A, ""))
        assert harness.turn() == []  # nobody was told that blocks linger
    elif when == "copying":
        assert harness.slots.granted == 2
        harness.copied()
        assert harness.turn() == [BlocksReleased(A)]
    if when == "queued":
        harness.push_receiver.stop(B)
        harness.hear(PushStopped(B, ""))
    assert harness.is_clean()


def test_a_dead_peer_keeps_the_slots_out_of_reach_for_a_while(harness):
    """What it had sent may still arrive: in slots, so the request's blocks are free."""
    harness.expect()
    harness.connect()
    harness.happen(ConnectionLost(harness.conn, "closed"))

    assert harness.turn() == [LoadResult(A, "10.0.0.1:5600 is gone: closed", quarantined=False)]
    assert harness.slots.granted == 2
    every, looks = QUARANTINE
    for _ in range(looks):
        assert harness.turn(seconds=every) == []
    assert harness.is_clean()


def test_a_push_that_keeps_others_waiting_gives_way(harness):
    """P may not have begun it, because it holds the prefills that wait here: neither would ever go on."""
    harness.expect(A, (1, 2, 3))
    harness.connect()
    assert harness.turn(seconds=SQUEEZE) == []  # nobody waits
    harness.expect(B, (4, 5))
    (failed,) = harness.turn()
    assert failed.request == A
    assert "others wait for its slots" in failed.failure
    harness.hear(PushStopped(A, ""))
    harness.turn()

    assert registered(harness)[B] == [(1, 2)]


def test_who_waits_for_slots_that_a_failed_push_keeps_does_not_wait_for_ever(harness):
    """P may hang, and never say that it writes no more: pushes of all other engines would stop."""
    harness.expect(A, (1, 2, 3))
    harness.connect()
    harness.expect(B, (4, 5))
    harness.push_receiver.stop(A)
    assert harness.turn() == [LoadResult(A, "the request was aborted")]
    assert harness.turn(seconds=SQUEEZE / 2) == []
    harness.expect(C, (6, 7))
    assert harness.push_receiver.advance(now=harness.now) == SQUEEZE

    sentence = f"a failed push has kept its slots of host memory for {SQUEEZE:g} s"
    assert harness.turn(seconds=SQUEEZE / 2) == [LoadResult(B, sentence)]
    harness.hear(PushStopped(A, ""))
    assert harness.turn(seconds=9 * SQUEEZE) == []
    assert registered(harness)[C] == [(1, 2)]


def test_the_wait_for_slots_has_its_limit_from_the_turn_in_which_another_push_fails(harness):
    """Nothing else may wake the thread until then."""
    harness.expect(A, (1, 2, 3))
    harness.connect()
    harness.expect(B, (4, 5))

    assert harness.push_receiver.advance(now=SQUEEZE) == 2 * SQUEEZE
    assert [result.request for result in harness.push_receiver.take_results()] == [A]


def test_who_waits_for_slots_goes_on_in_the_turn_in_which_another_push_times_out(harness):
    """Nothing else may wake the thread until then."""
    harness.expect(A, (1, 2, 3))
    harness.expect(B, (4, 5))
    due = harness.push_receiver.advance(now=SQUEEZE)

    assert [result.request for result in harness.push_receiver.take_results()] == [A]
    assert (harness.slots.granted, due) == (2, SQUEEZE + WAIT)


def test_who_waits_for_slots_goes_on_when_a_refused_peer_costs_another_its_turn(harness):
    """The same: slots that are free again before anybody had them."""
    harness.expect(A, (1, 2, 3))
    harness.connect()
    stranger = harness.peers.ensure_connected(EngineId("p9"), ADDRESS, now=0.0)
    harness.happen(ConnectFailed(stranger.conn, "refused", is_incompatible=True))
    harness.expect(B, (4, 5), engine=stranger.engine)
    harness.expect(C, (6, 7, 8), engine=stranger.engine)
    harness.hear(PushStopped(A, ""))

    assert [result.request for result in harness.turn()] == [A, B, C]
    assert harness.is_clean()


def test_a_long_prompt_is_copied_in_as_many_orders_as_one_message_may_name():
    """All of them must have ended."""
    harness = Harness(slots=2 * MAX_PART)
    blocks = range(1, MAX_PART + 2)
    harness.expect(A, blocks)
    harness.connect()
    harness.hear(PushDone(A, held=True))
    orders = harness.take_sent(CopyIn)
    assert [len(message.blocks[0]) for _, message in orders] == [MAX_PART, MAX_PART, 1, 1]
    for conn, message in orders[:-1]:
        harness.work(conn, CopyEnded(message.number, ""))
    assert harness.turn() == []
    harness.work(orders[-1][0], CopyEnded(orders[-1][1].number, ""))

    assert harness.turn() == [LoadResult(A, "")]


def test_a_push_that_brings_nothing_is_copied_at_once(harness):
    """A chunk may begin behind the prompt, and then no group lacks a block: no worker would ever report its end."""
    harness.expect(A, ())
    harness.connect()
    harness.hear(PushDone(A, held=True))

    assert harness.turn() == [LoadResult(A, "")]
    assert harness.take_sent(CopyIn) == []
    assert harness.is_clean()


def test_a_worker_that_comes_back_hears_what_it_owes(harness):
    """Its connection was lost, not its life; what it has answered, it is not asked again."""
    harness.expect()
    harness.connect()
    harness.hear(PushDone(A, held=True))
    (_, order), (_, same) = harness.take_sent(CopyIn)
    assert order == same
    harness.work(W0, CopyEnded(order.number, ""))
    harness.staging_receiver.on(ConnectionLost(W1, "closed"))
    harness.work(STRANGER, WorkerHello(1, b"guessed", receives_pushes=True))
    assert harness.link.closed == [STRANGER]
    assert not harness.staging_receiver.is_from_worker(ConnectionLost(STRANGER, ""))
    back = ConnId(104)
    harness.work(back, WorkerHello(1, TOKENS[1], receives_pushes=True))
    assert harness.take_sent(CopyIn) == [(back, order)]
    harness.work(back, CopyEnded(order.number, ""))
    harness.work(back, CopyEnded(order.number, ""))

    assert harness.turn() == [LoadResult(A, "")]
    assert harness.counters.take_report().counters["unknown_transfer_messages"] == 1
