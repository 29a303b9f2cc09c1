"""Pushing a model with a state: KV early, the state with the last part and never before it is final."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, ConnId, EngineEndpoint, EngineId, RequestId, XferId
from pdrelay_connector.core.messages import (
    LentBlocks,
    PeerMemory,
    PushAborted,
    PushWritten,
    Region,
    RegisterPush,
    StartPush,
)
from pdrelay_connector.core.ports import MessageReceived, PeerConnected, XferEnded, XferOutcome
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.push.push_job import ComputedBlocks
from support.engines import changed, rank_info
from support.engines import lent as blocks_of

D, SCHEDULER = ConnId(7), ConnId(1)
STATE, WIDTH = 1 << 20, 512  # where its region begins, and the bytes of one state


def info(name):
    """A rank with a layer of KV, 4 tokens a block, and one with a state."""
    kv = rank_info(name)
    state = Region(STATE, 13, 1, 1, WIDTH, WIDTH, 0, 0, group=1, state=True)
    return changed(kv, regions=(*kv.regions, state))


class World:
    """A writer whose writes are over at once."""

    def __init__(self):
        self.writes = []
        self.sent = []
        self.over = []
        self.writer = PushWriter(
            self, self, Counters(), info("p"), scheduler_endpoint=EngineEndpoint(EngineId("p"), Address("h", 1)),
            token=b"", timeout=1.0,
        )  # fmt: skip
        self.writer.advance(now=0.0)
        self.writer.on(PeerConnected(SCHEDULER, None), now=0.0)
        self.hear(PeerMemory(D, info("d")))

    def connect(self, peer, engine):
        return SCHEDULER

    def send(self, conn, message):
        self.sent.append(message)

    def attach(self, peer):
        return "d"

    def write(self, handle, spans):
        """Keep the blocks of states that are written, and the number of bytes of KV."""
        states = [
            (int(there - STATE) // WIDTH, int(here - STATE) // WIDTH) for there, here, _ in spans if here >= STATE
        ]
        self.writes.append((states, sum(int(size) for there, _, size in spans if there < STATE)))
        self.over.append(XferEnded(XferId(len(self.writes)), XferOutcome.DONE, 1, 1, 0.0, ""))
        return XferId(len(self.writes))

    def poll(self):
        over = self.over
        self.over = []
        return over

    def hear(self, message):
        self.writer.on(MessageReceived(SCHEDULER, message), now=0.0)

    def wanted(self, tokens=8):
        """D lends what ``tokens`` need."""
        groups = (changed(blocks_of(0, (5, 6))[0], stop=tokens), LentBlocks(tokens - 1, tokens, (BlockId(9),)))
        self.hear(StartPush(D, RegisterPush(RequestId("d-a"), RequestId("t"), "digest", groups)))

    def compute(self, blocks, tokens, *, state=(), attempt=0):
        """One step; the last one comes with the state's block."""
        groups = list(map(BlockId, blocks)), list(map(BlockId, state))
        piece = ComputedBlocks(RequestId("t"), "digest", attempt, groups, tokens, last=bool(state))
        self.writer.add_computed(piece, now=0.0)
        self.writer.advance(now=0.0)

    @property
    def ends(self):
        return [message for message in self.sent if isinstance(message, PushWritten | PushAborted)]


@pytest.mark.parametrize("tokens", [7, 8])
def test_a_state_comes_with_the_last_part(tokens):
    """A prompt that ends with a block is no exception: its KV may be complete a step before the prompt is."""
    world = World()
    world.wanted(tokens)
    world.compute([1], 4)
    world.compute([2] if tokens == 8 else [], tokens)
    before = list(world.writes)
    world.compute([] if tokens == 8 else [2], tokens, state=[3])

    assert [states for states, _ in before] == [[]]
    assert [states for states, _ in world.writes] == [[], [(9, 3)]]
    assert all(size for _, size in world.writes)
    assert [type(end) for end in world.ends] == [PushWritten]


def test_a_state_is_written_where_d_has_all_kv():
    """D registers after P has computed all of it, too."""
    world = World()
    world.compute([1, 2], 8, state=[3])
    world.wanted()

    assert [states for states, _ in world.writes] == [[(9, 3)]]


def test_a_new_attempt_has_another_state():
    """A preempted prefill starts again, in other blocks."""
    world = World()
    world.wanted()
    world.compute([1], 4)
    world.compute([2, 4], 8, state=[6], attempt=1)

    assert [states for states, _ in world.writes][-1] == [(9, 6)]


@pytest.mark.parametrize("tokens", [9, 12])
def test_a_state_after_more_tokens_is_not_written(tokens):
    """D would compute its last token on top of it."""
    world = World()
    world.wanted()
    world.compute([1, 2, 4], tokens, state=[3])

    (end,) = world.ends
    assert isinstance(end, PushAborted)
    assert end.reason == f"transfer t has a state after {tokens} tokens, one after 8 is wanted"
    assert world.writes == []
