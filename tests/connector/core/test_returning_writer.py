"""A worker that pushes its own KV and reads KV of earlier answers: two cores, one thread, one link."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, ConnId, EngineEndpoint, EngineId, RequestId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import (
    PROTOCOL,
    FenceResult,
    PeerMemory,
    PushWritten,
    ReadDone,
    RegisterPush,
    StartPush,
    Welcome,
)
from pdrelay_connector.core.ports import ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.core.pull.decode_worker import PullReader
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.push.prefill_worker import PushWriter
from pdrelay_connector.core.push.push_job import ComputedBlocks
from pdrelay_connector.core.results import LoadResult
from pdrelay_connector.core.returning_writer import ReturningWriter
from pdrelay_connector.core.session.peers import PeerTable
from support.engines import BLOCK_SIZE, FINGERPRINT, lent, rank_info
from support.recording_agent import RecordingAgent
from support.recording_link import ConnectingLink

SCHEDULER, D = ConnId(1), ConnId(2)  # in the order in which they are opened
GUEST = ConnId(7)  # D's connection, as our scheduler calls it
T = RequestId("t")
R = RequestId("r")
ENGINE = EngineId("d")
ADDRESS = Address("10.0.0.2", 5700)


class Worker:
    """A prefill engine's worker, whose scheduler is connected."""

    def __init__(self):
        self.link, self.written, self.read, self.now = ConnectingLink(), RecordingAgent(), RecordingAgent(), 0.0
        counters = Counters()
        own = rank_info("p")
        self.writer = PushWriter(
            self.link,
            self.written,
            counters,
            own,
            scheduler_endpoint=EngineEndpoint(EngineId("p"), Address("10.0.0.1", 5600)),
            token=b"token",
            timeout=20.0,
        )
        peers = PeerTable(self.link, FINGERPRINT, counters, retry_after=1.0)
        self.reader = PullReader(self.link, self.read, peers, counters, own, timeout=20.0)
        self.core = ReturningWriter(self.writer, self.reader)
        self.core.advance(now=0.0)
        self.on(PeerConnected(SCHEDULER, None))
        self.link.take_sent()

    def on(self, *events):
        for event in events:
            self.core.on(event, now=self.now)
        self.core.advance(now=self.now)

    def hear(self, conn, *messages):
        self.on(*(MessageReceived(conn, message) for message in messages))

    def meet(self):
        """Order a read of D's block 5, and have D answer."""
        whole = TokenRange(0, 0, BLOCK_SIZE, [BlockId(5)], [BlockId(3)])
        self.core.load(LoadOrder(R, RequestId("cached-1"), ENGINE, ADDRESS, (whole,)), now=self.now)
        self.on(PeerConnected(D, Welcome(PROTOCOL, ENGINE, FINGERPRINT, (rank_info("d"),))))


def order():
    return StartPush(GUEST, RegisterPush(RequestId("d-a"), T, "digest", lent(0, [4])))


@pytest.fixture
def worker():
    return Worker()


def test_a_read_ends_while_a_push_goes_on(worker):
    """Each has transfers of its own, and says what it says to its own peer."""
    worker.meet()
    worker.hear(SCHEDULER, PeerMemory(GUEST, rank_info("d")), order())
    piece = ComputedBlocks(T, "digest", 0, [[BlockId(1)]], BLOCK_SIZE, last=True)
    worker.core.add_computed(piece, now=0.0)
    assert (len(worker.read.posted), len(worker.written.posted)) == (1, 1)

    worker.read.end(0)
    worker.on()
    assert worker.link.sent == [(D, ReadDone(RequestId("cached-1"), R, 0, 1))]
    worker.hear(D, FenceResult(R, held=True))
    assert worker.core.take_results() == [LoadResult(R, "")]
    worker.written.end(0)
    worker.on()

    assert worker.link.sent[1:] == [(SCHEDULER, PushWritten(GUEST, RequestId("d-a")))]
    assert len(worker.core) == len(worker.writer)


def test_only_our_scheduler_can_have_us_write(worker):
    """A decode engine that we read from cannot name memory to write into; nor who has left."""
    worker.meet()
    worker.hear(D, PeerMemory(GUEST, rank_info("stranger")), order())
    worker.hear(ConnId(9), PeerMemory(GUEST, rank_info("stranger")), order())

    assert len(worker.writer) == 0
    assert worker.written.attached == []
    assert {D, ConnId(9)} <= set(worker.link.closed)


def test_a_decode_engine_that_is_gone_does_not_end_what_our_scheduler_has_ordered(worker):
    """Its connection closes twice at once: as the reader closes it, and as the network does."""
    worker.hear(SCHEDULER, PeerMemory(GUEST, rank_info("d")), order())
    worker.meet()
    worker.read.end(0)
    worker.on(ConnectionLost(D, "reset"), ConnectionLost(D, "reset"))

    assert worker.core.take_results()[0].failure
    assert worker.written.attached == ["d"]
    assert worker.writer.owns(SCHEDULER)


def test_a_scheduler_that_is_gone_orders_nothing_more(worker):
    worker.hear(SCHEDULER, PeerMemory(GUEST, rank_info("d")))
    worker.on(ConnectionLost(SCHEDULER, "it ended"))
    worker.hear(SCHEDULER, PeerMemory(GUEST, rank_info("d")))

    assert worker.written.attached == []


def test_the_thread_wakes_for_whichever_is_due_first(worker):
    assert worker.core.advance(now=0.0) is None
    worker.meet()

    assert worker.core.advance(now=0.0) < 0.01
