"""Writing: what is computed meets who wants it, in every order, and nothing is called written that is not."""

import pytest

from pdrelay_connector.core.counters import Counters, ForwardingCounters, merge
from pdrelay_connector.core.ids import Address, ConnId, EngineEndpoint, EngineId, RequestId
from pdrelay_connector.core.messages import (
    MAX_REASON,
    PeerGone,
    PeerMemory,
    PushAborted,
    PushWritten,
    RegisterPush,
    StartPush,
    StopPush,
    WorkerHello,
)
from pdrelay_connector.core.ports import (
    ConnectFailed,
    ConnectionLost,
    MessageReceived,
    PeerConnected,
    XferOutcome,
)
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.push.push_job import (
    ComputedBlocks,
    TransferOver,
)
from pdrelay_connector.core.session.scheduler_link import RETRY
from pdrelay_connector.core.transfer.transfers import POLL_INTERVAL
from support.engines import BLOCK_SIZE, changed, lent, rank_info
from support.in_memory import pieces_of
from support.recording_agent import RecordingAgent
from support.recording_link import ConnectingLink

D = ConnId(7)
ELSE = ConnId(8)
HOME = EngineEndpoint(EngineId("p"), Address("10.0.0.1", 5600))
T = RequestId("t")
R = RequestId("d-a")
TIMEOUT = 20.0


class Harness:
    """A writer, and everybody it talks to."""

    def __init__(self, link=None, counters=None, rank=rank_info("p", rank=1, ranks=2)):  # noqa: B008 (it is frozen)
        self.link, self.counters = link or ConnectingLink(), counters or Counters()
        self.mover = RecordingAgent()
        self.now = 0.0
        self.writer = PushWriter(
            self.link,
            self.mover,
            self.counters,
            rank,
            scheduler_endpoint=HOME,
            token=b"token",
            timeout=TIMEOUT,
        )
        self.writer.advance(now=0.0)
        self.scheduler_endpoint = ConnId(1)
        self.computed = {}  # tokens of each attempt
        self.writer.on(PeerConnected(self.scheduler_endpoint, None), now=0.0)
        self.link.sent.clear()

    def hear(self, *messages):
        for message in messages:
            self.writer.on(MessageReceived(self.scheduler_endpoint, message), now=self.now)

    def arrive(self, peer=D, name="d"):
        self.hear(PeerMemory(peer, rank_info(name, rank=1, ranks=2), name))

    def lose_scheduler(self):
        """It is back a second later."""
        self.writer.on(ConnectionLost(self.scheduler_endpoint, "closed"), now=5.0)
        self.writer.on(PeerConnected(self.scheduler_endpoint, None), now=6.0)

    def assign(self, *blocks, reader=R, first=0, prompt="digest", peer=D, request=T):
        order = RegisterPush(RequestId(reader), RequestId(request), prompt, lent(first, blocks))
        self.hear(StartPush(peer, order))

    def compute(self, *blocks, last=False, attempt=0, prompt="digest", ready=None, request=T):
        before = self.computed.get((request, attempt), 0)
        self.computed[request, attempt] = tokens = before + len(blocks) * BLOCK_SIZE
        piece = ComputedBlocks(RequestId(request), prompt, attempt, [list(blocks)], tokens, last)
        self.writer.add_computed(piece, now=self.now, ready=ready)

    def end(self, *flights, outcome=XferOutcome.DONE, reason=""):
        self.mover.end(*flights, outcome=outcome, reason=reason)
        return self.writer.advance(now=self.now)

    def take_sent(self):
        return self.link.take_sent()

    def written(self):
        """Blocks of ours -> blocks of theirs, write by write."""
        pieces = [sorted((local, remote) for remote, local in pieces_of(spans)) for _, spans in self.mover.posted]
        return [tuple(map(list, zip(*each, strict=True))) for each in pieces]

    def counted(self):
        return self.counters.take_report().counters


@pytest.fixture
def harness():
    harness = Harness()
    harness.arrive()
    return harness


def test_it_attends_at_its_own_scheduler_and_calls_again_until_it_listens():
    """The scheduler starts to listen after its workers."""
    link = ConnectingLink()
    mover = RecordingAgent()
    writer = PushWriter(
        link,
        mover,
        Counters(),
        rank_info("p", rank=1, ranks=2),
        scheduler_endpoint=HOME,
        token=b"token",
        timeout=TIMEOUT,
    )
    assert writer.advance(now=0.0) is None
    assert writer.advance(now=9.0) is None
    assert link.met == [HOME]
    writer.on(ConnectFailed(ConnId(1), "refused"), now=10.0)
    assert writer.advance(now=10.0) == pytest.approx(10.0 + RETRY)
    writer.advance(now=10.0 + RETRY)
    writer.on(PeerConnected(ConnId(2), None), now=10.5)

    assert link.met == [HOME, HOME]
    assert link.take_sent() == [WorkerHello(1, b"token")]


def test_a_write_is_counted_before_the_scheduler_receives_its_end():
    """It takes a step then, perhaps the last one for long, and vLLM collects the workers' numbers with a step."""
    told, told_by_then = [], []

    class Watched(ConnectingLink):
        def send(self, conn, message):
            super().send(conn, message)
            told_by_then.append((message, merge(told)))

    harness = Harness(Watched(), ForwardingCounters(told.append))
    harness.arrive()
    harness.compute(4, 5, last=True)
    harness.assign(1, 2)
    harness.end(0)

    message, report = told_by_then[-1]
    assert message == PushWritten(D, R)
    assert ([sample.peer for sample in report.transfers], report.counters["pushes"]) == (["d"], 1)


def test_all_of_a_block_is_written_where_vllm_would_zero_it():
    """What it held before may be another group's bytes, which a kernel takes for NaN."""
    whole = rank_info("p")
    (region,) = whole.regions
    rows = changed(region, count=2 * region.count, tokens=BLOCK_SIZE // 2, rows=2, row_stride=region.row_stride // 2)
    sizes = {}
    for zeroed in (frozenset(), frozenset({0})):
        harness = Harness(rank=changed(whole, regions=(rows,)))
        harness.hear(PeerMemory(D, changed(whole, agent=b"d", regions=(rows,)), "d"))
        order = RegisterPush(R, T, None, (changed(lent(0, [5])[0], stop=1),))
        harness.hear(StartPush(D, order))
        harness.writer.add_computed(ComputedBlocks(T, None, 0, [[3]], 1, True, zeroed), now=0.0)
        sizes[zeroed] = sum(int(length) for _, spans in harness.mover.posted for *_, length in spans)

    assert sizes == {frozenset(): region.row_stride // 2, frozenset({0}): region.row_stride}


def test_what_the_device_has_not_finished_is_not_written(harness):
    """Kernels of the steps before may still run when the engine announces their blocks; order is kept."""
    is_ready = []
    harness.assign(1, 2)
    harness.compute(4, ready=lambda: bool(is_ready))
    harness.compute(5, last=True)
    assert harness.writer.advance(now=1.0) == pytest.approx(1.0 + POLL_INTERVAL)
    assert harness.mover.posted == []
    is_ready.append(True)
    harness.writer.advance(now=1.0)
    harness.end(0, 1)

    assert harness.written() == [([4], [1]), ([5], [2])]
    assert harness.take_sent() == [PushWritten(D, R)]


def test_pieces_that_are_not_ready_are_forgotten_with_their_transfer(harness):
    """Others' stay."""
    harness.compute(4, ready=lambda: True)
    harness.compute(5, request="other", ready=lambda: True)
    harness.writer.add_computed(TransferOver(RequestId(T)), now=0.0, ready=lambda: True)
    harness.writer.advance(now=0.0)

    assert harness.writer._sources.keys() == {"other"}
    assert len(harness.writer) == 2  # the other prompt, and a decode engine


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ("digest", "another", "transfer t belongs to another prompt"),
        ("digest", None, "transfer t was registered without its prompt's digest"),
        (None, "digest", "transfer t belongs to another prompt"),
    ],
)
def test_another_prompt_is_not_written(harness, ours, theirs, reason):
    """Whatever the router mixed up; who leaves the digest out does not know the prompt, and may be a stranger."""
    harness.assign(1, prompt=theirs)
    harness.assign(2, prompt=ours, reader="d-b")
    harness.compute(4, last=True, prompt=ours)
    harness.end(0)

    assert harness.written() == [([4], [2])]
    assert harness.take_sent() == [PushAborted(D, R, reason), PushWritten(D, RequestId("d-b"))]


def test_too_few_blocks_are_refused_at_the_end(harness):
    """The rest would never come."""
    harness.assign(1, 2, 3)
    harness.compute(4, 5)
    harness.end(0)
    harness.compute(last=True)

    assert harness.take_sent() == [PushAborted(D, R, "transfer t has 8 tokens, 12 are wanted")]


@pytest.mark.parametrize("block", [13, 10**6])
def test_a_block_that_the_decode_engine_does_not_have_is_refused(harness, block):
    """It would be somebody else's memory."""
    harness.compute(4, last=True)
    harness.assign(block)
    (ceased,) = harness.take_sent()

    assert harness.mover.posted == []
    assert f"block {block}, for tokens 0 to 4 of group 0, is not one of the peer's 13 blocks" in ceased.reason


def test_a_memory_that_nixl_refuses(harness):
    """As before; NIXL's words may be long."""
    harness.mover.fails = lambda handle: "x" * MAX_REASON * 2
    harness.arrive(ELSE, "e")
    harness.compute(4, last=True)
    harness.assign(1, peer=ELSE)

    assert harness.take_sent() == [PushAborted(ELSE, R, "x" * MAX_REASON)]


def test_a_write_that_fails_ceases_the_push_when_nothing_flies(harness):
    """Until then the decode engine's blocks are not safe."""
    harness.assign(1, 2)
    harness.compute(4)
    harness.compute(5)
    harness.end(0, outcome=XferOutcome.FAILED, reason="no route")
    assert harness.take_sent() == []
    harness.compute(6, last=True)
    harness.end(1, outcome=XferOutcome.FAILED, reason="cancelled")

    assert len(harness.mover.posted) == 2
    assert harness.take_sent() == [PushAborted(D, R, "NIXL: no route")]


def test_a_scheduler_that_is_back_hears_how_what_still_flies_ends(harness):
    """It says everything again, and waits for an end."""
    harness.assign(1, 2)
    harness.compute(4)
    harness.lose_scheduler()
    harness.arrive()
    harness.assign(1, 2)
    harness.hear(StopPush(D, R))
    harness.end(0)

    assert harness.take_sent() == [WorkerHello(1, b"token"), PushAborted(D, R, "the decode engine is gone")]


def test_the_end_of_a_push_is_told_when_its_decode_engine_has_left(harness):
    """It may be back, and waits to hear that nothing is written any more."""
    harness.assign(1, 2)
    harness.compute(4)
    harness.hear(PeerGone(D))
    assert harness.take_sent() == []
    harness.end(0)

    assert harness.take_sent() == [PushAborted(D, R, "the decode engine is gone")]


def test_a_scheduler_that_asks_for_the_end_of_a_push_hears_it_again(harness):
    """It was told while the connection was lost; what is still written ends later."""
    harness.assign(1, 2)
    harness.compute(4)
    harness.lose_scheduler()
    harness.hear(StopPush(D, R))
    assert harness.take_sent() == [WorkerHello(1, b"token")]
    harness.end(0)
    assert harness.take_sent() == [PushAborted(D, R, "the decode engine is gone")]
    harness.hear(StopPush(D, R))

    assert harness.take_sent() == [PushAborted(D, R, "")]


def test_a_prompt_that_outlives_the_loss_of_its_scheduler_is_whole(harness):
    """Pieces are counted from the first: were it forgotten, the second would be taken for the beginning."""
    harness.compute(4)
    harness.lose_scheduler()
    harness.arrive()
    harness.assign(1, 2)
    harness.compute(5, 6, last=True)
    harness.end(*range(len(harness.mover.posted)))

    assert harness.written() == [([4], [1]), ([5], [2])]
    assert PushWritten(D, R) in harness.take_sent()
