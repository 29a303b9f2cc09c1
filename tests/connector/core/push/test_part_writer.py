"""A part of a push on its way, through host memory or not: told once how it ended, whatever fails and whenever."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId
from pdrelay_connector.core.layout.transfer_plan import TokenRange, push_route
from pdrelay_connector.core.ports import XferOutcome
from pdrelay_connector.core.push.part_writer import (
    PartWriteEnded,
    PartWriter,
)
from pdrelay_connector.core.staging.slots import HostBuffer, Slots
from pdrelay_connector.core.transfer.remote_memory import RemoteRank
from pdrelay_connector.core.transfer.transfers import POLL_INTERVAL, QUARANTINE_POLL_INTERVAL
from pdrelay_connector.errors import HostBufferTooSmall, ProtocolViolation, TransferError
from support.engines import BLOCK_SIZE, rank_info
from support.in_memory import BLOCK_BYTES
from support.recording_agent import RecordingAgent, RecordingCopier

TIMEOUT, SLOTS = 20.0, 4


class Harness:
    """One worker's transfers, and everything it touches."""

    def __init__(self, *, staged=False, to=("d/0", "d/1")):
        self.mover, self.copier, self.counters, self.now = RecordingAgent(), RecordingCopier(), Counters(), 0.0
        self.slots = Slots((SLOTS,))
        self.part_writer = PartWriter(
            self.mover, self.counters, timeout=TIMEOUT, staging=HostBuffer(self.slots, self.copier) if staged else None
        )
        self.remote_ranks = [RemoteRank(name, push_route(rank_info("p"), rank_info(name))) for name in to]

    def send(self, *blocks, remote_ranks=None):
        """Send blocks: each goes to the one of theirs with the same number, a few further on."""
        theirs = [BlockId(block % 10 + 1) for block in blocks]
        whole = TokenRange(0, 0, len(blocks) * BLOCK_SIZE, theirs, list(map(BlockId, blocks)))
        return self.part_writer.write(
            self.remote_ranks if remote_ranks is None else remote_ranks, [whole], now=self.now
        )

    def copied(self, *numbers, reason=""):
        self.copier.end(*numbers, reason=reason)
        return self.advance()

    def ended(self, *numbers, outcome=XferOutcome.DONE, reason=""):
        self.mover.end(*numbers, outcome=outcome, reason=reason)
        return self.advance()

    def advance(self):
        return self.part_writer.advance(now=self.now)

    def writes(self):
        """Return what was written, as pieces: there, here, how many."""
        return [(handle, (spans // BLOCK_BYTES).tolist()) for handle, spans in self.mover.posted]

    def is_over(self):
        """Whether nothing is left of anything."""
        tables = (self.part_writer._parts, self.part_writer._transfers._xfers, self.part_writer._transfers._copies)
        return not any(tables) and not self.slots.granted and not len(self.slots)


@pytest.fixture
def harness():
    return Harness()


@pytest.fixture
def staged():
    return Harness(staged=True)


def test_with_staging_it_is_copied_into_slots_and_written_from_there(staged):
    """The device's blocks are free to be read by others meanwhile; the slots are ours until it is written."""
    transfer = staged.send(4, 5)
    assert (staged.advance(), staged.copier.copies) == ([], [([[4, 5]], [[1, 2]])])
    assert staged.mover.posted == []
    assert staged.copied(0) == []
    assert staged.writes() == [("d/0", [[5, 1, 2]]), ("d/1", [[5, 1, 2]])]
    assert staged.ended(0) == []
    assert staged.slots.granted == 2
    assert staged.ended(1) == [PartWriteEnded(transfer, "")]

    assert staged.counters.take_report().counters == {"bytes_staged_out": 64}
    assert staged.is_over()


@pytest.mark.parametrize(
    ("is_staged", "blocks", "error", "sentence"),
    [
        (False, (0,), ProtocolViolation, "not held"),
        (True, (0,), ProtocolViolation, "not held"),
        (False, (99,), ProtocolViolation, "block 99"),
        (True, (1, 2, 3, 4, 5), HostBufferTooSmall, "5 slots of KV cache group 0 are wanted"),
    ],
)
def test_what_cannot_be_sent_raises_and_leaves_nothing(is_staged, blocks, error, sentence):
    """The push says why it stops."""
    harness = Harness(staged=is_staged)
    with pytest.raises(error, match=sentence):
        harness.send(*blocks)

    assert harness.advance() == []
    assert harness.is_over()
    assert len(harness.part_writer) == 0


@pytest.mark.parametrize("fails_at", ["d/0", "d/1"])
def test_a_write_that_cannot_start_from_host_memory_gives_its_slots_back(staged, fails_at):
    """After what has started is over."""
    staged.mover.fails = {fails_at: f"no route to {fails_at}"}.get
    transfer = staged.send(4)
    staged.advance()
    ended = staged.copied(0)
    assert staged.mover.cancelled == list(range(len(staged.mover.posted)))
    ended += staged.ended(*range(len(staged.mover.posted)), outcome=XferOutcome.FAILED)
    ended += staged.advance()

    assert ended == [PartWriteEnded(transfer, f"no route to {fails_at}")]
    assert staged.is_over()


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_one_write_of_several_that_fails_ends_it_once_when_all_are_over(is_staged, order):
    """With the first reason; the others are cancelled, and may well have moved all the same."""
    harness = Harness(staged=is_staged, to=("d/0", "d/1", "d/2"))
    transfer = harness.send(4)
    harness.advance()
    if is_staged:
        harness.copied(0)
    first, second, third = order
    assert harness.ended(first) == []
    assert harness.ended(second, outcome=XferOutcome.FAILED, reason="peer gone") == []
    assert harness.mover.cancelled == [third]
    assert harness.slots.granted == is_staged

    assert harness.ended(third) == [PartWriteEnded(transfer, "NIXL: peer gone")]
    assert harness.is_over()


def test_what_waits_for_room_leaves_the_line_when_it_is_cancelled(staged):
    """Those behind it go on."""
    first = staged.send(1, 2, 3)
    second = staged.send(4, 5)
    third = staged.send(6)
    staged.advance()
    staged.part_writer.cancel(second, "nobody wants it")
    staged.part_writer.cancel(second, "twice")
    assert staged.part_writer.due(now=5.0) == 5.0
    assert staged.advance() == [PartWriteEnded(second, "nobody wants it")]
    assert staged.copier.copies[1] == ([[6]], [[4]])
    staged.copied(0, 1)

    assert sorted(staged.ended(0, 1, 2, 3)) == [PartWriteEnded(first, ""), PartWriteEnded(third, "")]
    assert staged.is_over()


def test_copies_and_writes_have_a_deadline_each_and_waiting_for_room_has_none(staged):
    """Room is made by others, who have deadlines."""
    first, second = staged.send(1, 2, 3), staged.send(4, 5)
    staged.advance()
    assert staged.part_writer.overdue(now=TIMEOUT - 0.1) == []
    assert staged.part_writer.overdue(now=TIMEOUT) == [first]
    staged.now = TIMEOUT / 2
    staged.copied(0)
    assert staged.part_writer.overdue(now=TIMEOUT) == []
    assert staged.part_writer.overdue(now=TIMEOUT * 1.5) == [first]
    staged.part_writer.cancel(first, "it did not end")

    assert staged.part_writer.overdue(now=1e9) == []
    assert len(staged.part_writer) == 2
    assert second in staged.part_writer._parts


def test_it_polls_often_during_transfers_and_seldom_during_a_quarantine(staged):
    """And not at all when there is nothing."""
    assert staged.part_writer.due(now=1.0) is None
    transfer = staged.send(4)
    assert staged.part_writer.due(now=1.0) == 1.0 + QUARANTINE_POLL_INTERVAL
    staged.advance()
    assert staged.part_writer.due(now=1.0) == 1.0 + POLL_INTERVAL
    staged.copied(0)
    assert staged.part_writer.due(now=1.0) == 1.0 + POLL_INTERVAL
    staged.part_writer.cancel(transfer, "nobody wants it")
    assert staged.part_writer.due(now=1.0) == 1.0 + QUARANTINE_POLL_INTERVAL
    staged.ended(0, 1)

    assert staged.part_writer.due(now=1.0) is None


KINDS = ["send", "cancel", "copied", "not copied", "moved", "failed", "advance", "break"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99)), max_size=60)


@given(is_staged=st.booleans(), steps=STEPS)
def test_in_any_order_of_events_every_part_ends_once_and_all_slots_come_back(is_staged, steps):
    """And while a transfer has not ended, nobody else has its slots."""
    harness = Harness(staged=is_staged)
    sent = []
    over = []
    copies = set()
    flights = set()
    for what, number in [*steps, *[("copied", n) for n in range(99)], *[("moved", n) for n in range(200)]]:
        copies, flights = do(harness, what, number, sent, copies, flights)
        over += harness.advance()
    while len(harness.part_writer):
        copies, flights = do(harness, "copied", 0, sent, *do(harness, "moved", 0, sent, copies, flights))
        over += harness.advance()

    assert sorted(ended.part for ended in over) == sorted(sent)
    assert harness.is_over()


def do(harness, what, number, sent, copies, flights):
    """One step; return the numbers of the copies and of the writes that have ended."""
    open_copies, open_flights = (
        [number for number in range(len(harness.copier.copies)) if number not in copies],
        [number for number in range(len(harness.mover.posted)) if number not in flights],
    )
    match what:
        case "send":
            try:
                sent.append(harness.send(*range(1, 2 + number % SLOTS)))
            except TransferError:
                assert harness.mover.fails("d/0")
        case "break":
            broken = [None, "d/0", "d/1"][number % 3]
            harness.mover.fails = {broken: f"no route to {broken}"}.get
        case "cancel" if sent:
            harness.part_writer.cancel(sent[number % len(sent)], "nobody wants it")
        case "copied" | "not copied" if open_copies:
            copies = copies | {open_copies[number % len(open_copies)]}
            harness.copier.end(open_copies[number % len(open_copies)], reason="out of memory" * (what == "not copied"))
        case "moved" | "failed" if open_flights:
            flights = flights | {open_flights[number % len(open_flights)]}
            outcome = XferOutcome.DONE if what == "moved" else XferOutcome.FAILED
            harness.mover.end(open_flights[number % len(open_flights)], outcome=outcome, reason="broken")
    return copies, flights
