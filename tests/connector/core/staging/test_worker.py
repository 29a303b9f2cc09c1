"""A worker that copies for its scheduler, and the connection it has to it."""

import pytest

from pdrelay_connector.core.counters import Counters, ForwardingCounters, merge
from pdrelay_connector.core.ids import Address, ConnId, EngineEndpoint, EngineId
from pdrelay_connector.core.messages import CopyEnded, CopyIn, CopyOut, HeartbeatReply, WorkerHello
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.core.session.scheduler_link import RETRY, SchedulerLink
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.worker import StagingWorker
from support.copying import MemoryCopier
from support.in_memory import InMemoryNetwork
from support.recording_link import ConnectingLink
from support.staging_world import region

HOME = EngineEndpoint(EngineId("p"), Address("10.0.0.1", 5600))
CONN = ConnId(1)
ATTEND = WorkerHello(0, b"token")


class Harness:
    """A worker with four blocks and two slots, at home."""

    def __init__(self, link=None, counters=None):
        self.network, self.link, self.counters = InMemoryNetwork(), link or ConnectingLink(), counters or Counters()
        self.network.memories["p"] = [b"null", b"one", b"two", b"three", b"-", b"-", b"-"]
        self.copier = MemoryCopier(self.network, "p", [region(0, 4, 0)], [region(4, 3, 0)])
        self.stager = StagingWorker(self.link, self.copier, self.counters, scheduler_endpoint=HOME, hello=ATTEND)
        self.turn()
        self.hear(PeerConnected(CONN, None))

    def hear(self, *events):
        for event in events:
            self.stager.on(event, now=0.0)

    def turn(self, now=0.0):
        return self.stager.advance(now=now)

    def order(self, message):
        self.hear(MessageReceived(CONN, message))


@pytest.fixture
def harness():
    return Harness()


def test_blocks_are_copied_out_and_in(harness):
    """And each is told when it is over."""
    assert (harness.link.met, harness.link.take_sent()) == ([HOME], [ATTEND])
    harness.order(CopyOut(7, ((3, 1),), ((1, 2),)))
    harness.order(CopyIn(8, ((2, 1),), ((2, 3),)))
    assert len(harness.stager) == 2
    harness.turn()

    assert harness.network.memories["p"] == [b"null", b"one", b"one", b"three", b"-", b"three", b"one"]
    assert harness.link.take_sent() == [CopyEnded(7, ""), CopyEnded(8, "")]
    assert harness.counters.take_report().counters == {"bytes_staged_out": 128, "bytes_staged_in": 128}
    assert len(harness.stager) == 0


def test_a_copy_is_counted_before_the_scheduler_receives_its_end():
    """It takes a step then, and vLLM collects the workers' numbers with a step."""
    told, told_by_then = [], []

    class Watched(ConnectingLink):
        def send(self, conn, message):
            super().send(conn, message)
            told_by_then.append((message, merge(told).counters))

    harness = Harness(Watched(), ForwardingCounters(told.append))
    harness.order(CopyOut(7, ((1,),), ((1,),)))
    harness.turn()

    assert told_by_then[-1] == (CopyEnded(7, ""), {"bytes_staged_out": 64})


def test_a_failed_copy_is_reported_with_the_reason(harness):
    """Not more of it than fits into the message."""
    harness.link.take_sent()
    harness.copier.failure = "x" * 10_000
    harness.order(CopyOut(7, ((1,),), ((1,),)))
    harness.turn()

    assert harness.link.take_sent() == [CopyEnded(7, "x" * 2048)]
    assert harness.counters.take_report().counters == {}


def test_a_copy_that_runs_is_not_started_again(harness):
    """Our scheduler asks again when the connection was lost; it hears of the one that runs, once."""
    harness.copier.stuck = True
    harness.order(CopyOut(7, ((1,),), ((1,),)))
    harness.hear(ConnectionLost(CONN, "reset"), PeerConnected(ConnId(2), None))
    harness.hear(MessageReceived(ConnId(2), CopyOut(7, ((1,),), ((1,),))))
    harness.copier.stuck = False
    harness.link.take_sent()
    harness.turn()

    assert harness.link.sent == [(ConnId(2), CopyEnded(7, ""))]
    assert harness.counters.take_report().counters["peers_lost"] == 1


def test_a_copy_that_ended_unheard_is_made_again(harness):
    """The slots are still kept for it."""
    harness.order(CopyOut(7, ((1,),), ((1,),)))
    harness.hear(ConnectionLost(CONN, "reset"))
    harness.link.take_sent()
    harness.turn()
    assert harness.link.take_sent() == []
    harness.hear(PeerConnected(ConnId(2), None), MessageReceived(ConnId(2), CopyOut(7, ((1,),), ((1,),))))
    harness.turn()

    assert harness.link.take_sent() == [ATTEND, CopyEnded(7, "")]


def test_a_copy_that_ended_while_its_order_came_again_is_not_made_again(harness):
    """The scheduler hears of its end next, and may give the slots to others: nothing must be copied into them then."""
    harness.copier.stuck = True
    harness.order(CopyOut(7, ((1,),), ((1,),)))
    harness.hear(ConnectionLost(CONN, "reset"), PeerConnected(ConnId(2), None))
    harness.copier.stuck = False
    harness.turn()
    harness.hear(MessageReceived(ConnId(2), CopyOut(7, ((1,),), ((1,),))))

    assert len(harness.stager) == 0
    assert harness.link.take_sent()[-1] == CopyEnded(7, "")


def test_what_a_scheduler_does_not_say_to_this_worker_is_counted(harness):
    """And does no harm."""
    harness.order(HeartbeatReply())

    assert harness.counters.take_report().counters == {"unknown_transfer_messages": 1}


def test_home_is_called_again_after_a_pause():
    """Our scheduler starts to listen after us."""
    link = ConnectingLink()
    scheduler_endpoint = SchedulerLink(link, HOME, ATTEND)
    assert scheduler_endpoint.advance(now=5.0) is None
    scheduler_endpoint.send(HeartbeatReply())
    assert not scheduler_endpoint.on(ConnectFailed(CONN, "refused"), now=5.0)
    assert scheduler_endpoint.advance(now=5.0) == 5.0 + RETRY
    assert scheduler_endpoint.advance(now=5.0 + RETRY) is None
    assert not scheduler_endpoint.on(PeerConnected(CONN, None), now=6.0)
    scheduler_endpoint.send(HeartbeatReply())
    assert scheduler_endpoint.on(ConnectionLost(CONN, "reset"), now=7.0)
    scheduler_endpoint.send(HeartbeatReply())
    assert scheduler_endpoint.advance(now=7.0) == 7.0 + RETRY

    assert link.met == [HOME, HOME]
    assert link.sent == [(CONN, ATTEND), (CONN, HeartbeatReply())]
    assert not scheduler_endpoint.on(MessageReceived(CONN, HeartbeatReply()), now=8.0)


def test_a_crew_knows_its_members_by_their_tokens():
    """Anybody who reaches the port could claim to be one."""
    link = ConnectingLink()
    workers = WorkerLinks(link, {0: b"zero", 1: b"one"})
    assert not workers.add(CONN, WorkerHello(0, b"one"))
    assert not workers.add(CONN, WorkerHello(2, b"zero"))
    workers.send(0, HeartbeatReply())
    assert (link.sent, set(workers.ranks), workers.rank_of(CONN)) == ([], {0, 1}, None)
    assert workers.add(CONN, WorkerHello(0, b"zero"))
    workers.send(0, HeartbeatReply())

    assert (link.sent, workers.rank_of(CONN)) == ([(CONN, HeartbeatReply())], 0)


def test_a_worker_that_comes_again_takes_its_own_place():
    """What the connection before still says, and its end, mean nothing any more."""
    workers = WorkerLinks(ConnectingLink(), {0: b"zero"})
    workers.add(CONN, WorkerHello(0, b"zero"))
    workers.add(ConnId(2), WorkerHello(0, b"zero"))
    workers.remove(CONN)
    assert (workers.rank_of(CONN), workers.rank_of(ConnId(2))) == (None, 0)
    workers.remove(ConnId(2))

    assert workers.rank_of(ConnId(2)) is None
