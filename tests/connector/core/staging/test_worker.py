"""A worker that copies for its scheduler, and the connection it has to it."""

import pytest

from support.copying import MemoryCopier
from support.staging_world import region
from xpyd_connector.core.counters import Tally, Telling, merge
from xpyd_connector.core.ids import Address, ConnId, EngineAt, EngineId
from xpyd_connector.core.messages import Alive, Attend, CopyEnded, CopyIn, CopyOut
from xpyd_connector.core.ports import Failed, Lost, Met, Received
from xpyd_connector.core.session.scheduler_link import RETRY, Home
from xpyd_connector.core.session.worker_links import Crew
from xpyd_connector.core.staging.worker import Stager
from xpyd_connector.io.in_memory import Network

HOME, CONN = EngineAt(EngineId("p"), Address("10.0.0.1", 5600)), ConnId(1)
ATTEND = Attend(0, b"token")


class Link:
    """Goes nowhere."""

    def __init__(self):
        self.met, self.sent = [], []

    def meet(self, peer, engine):
        self.met.append(EngineAt(engine, peer))

    def send(self, conn, message):
        self.sent.append((conn, message))

    def said(self):
        sent, self.sent = self.sent, []
        return [message for _, message in sent]


class Desk:
    """A worker with four blocks and two slots, at home."""

    def __init__(self, link=None, tally=None):
        self.network, self.link, self.tally = Network(), link or Link(), tally or Tally()
        self.network.memories["p"] = [b"null", b"one", b"two", b"three", b"-", b"-", b"-"]
        self.copier = MemoryCopier(self.network, "p", [region(0, 4, 0)], [region(4, 3, 0)])
        self.stager = Stager(self.link, self.copier, self.tally, home=HOME, attend=ATTEND)
        self.turn()
        self.hear(Met(CONN, None))

    def hear(self, *events):
        for event in events:
            self.stager.on(event, now=0.0)

    def turn(self, now=0.0):
        return self.stager.advance(now=now)

    def order(self, message):
        self.hear(Received(CONN, message))


@pytest.fixture
def desk():
    return Desk()


def test_blocks_are_copied_out_and_in(desk):
    """And each is told when it is over."""
    assert (desk.link.met, desk.link.said()) == ([HOME], [ATTEND])
    desk.order(CopyOut(7, ((3, 1),), ((1, 2),)))
    desk.order(CopyIn(8, ((2, 1),), ((2, 3),)))
    assert len(desk.stager) == 2
    desk.turn()

    assert desk.network.memories["p"] == [b"null", b"one", b"one", b"three", b"-", b"three", b"one"]
    assert desk.link.said() == [CopyEnded(7, ""), CopyEnded(8, "")]
    assert desk.tally.take().counters == {"bytes_staged_out": 128, "bytes_staged_in": 128}
    assert len(desk.stager) == 0


def test_what_was_copied_is_told_before_the_scheduler_hears_of_it():
    """It takes a step then, and vLLM collects the workers' numbers with a step."""
    told, told_by_then = [], []

    class Watched(Link):
        def send(self, conn, message):
            super().send(conn, message)
            told_by_then.append((message, merge(told).counters))

    desk = Desk(Watched(), Telling(told.append))
    desk.order(CopyOut(7, ((1,),), ((1,),)))
    desk.turn()

    assert told_by_then[-1] == (CopyEnded(7, ""), {"bytes_staged_out": 64})


def test_a_copy_that_fails_is_told_with_the_reason(desk):
    """Not more of it than fits into the message."""
    desk.link.said()
    desk.copier.failure = "x" * 10_000
    desk.order(CopyOut(7, ((1,),), ((1,),)))
    desk.turn()

    assert desk.link.said() == [CopyEnded(7, "x" * 2048)]
    assert desk.tally.take().counters == {}


def test_a_copy_that_runs_is_not_started_again(desk):
    """Our scheduler asks again when the connection was lost; it hears of the one that runs, once."""
    desk.copier.stuck = True
    desk.order(CopyOut(7, ((1,),), ((1,),)))
    desk.hear(Lost(CONN, "reset"), Met(ConnId(2), None))
    desk.hear(Received(ConnId(2), CopyOut(7, ((1,),), ((1,),))))
    desk.copier.stuck = False
    desk.link.said()
    desk.turn()

    assert desk.link.sent == [(ConnId(2), CopyEnded(7, ""))]
    assert desk.tally.take().counters["peers_lost"] == 1


def test_a_copy_that_ended_unheard_is_made_again(desk):
    """The slots are still kept for it."""
    desk.order(CopyOut(7, ((1,),), ((1,),)))
    desk.hear(Lost(CONN, "reset"))
    desk.link.said()
    desk.turn()
    assert desk.link.said() == []
    desk.hear(Met(ConnId(2), None), Received(ConnId(2), CopyOut(7, ((1,),), ((1,),))))
    desk.turn()

    assert desk.link.said() == [ATTEND, CopyEnded(7, "")]


def test_a_copy_that_ended_while_its_order_came_again_is_not_made_again(desk):
    """The scheduler hears of its end next, and may give the slots to others: nothing must be copied into them then."""
    desk.copier.stuck = True
    desk.order(CopyOut(7, ((1,),), ((1,),)))
    desk.hear(Lost(CONN, "reset"), Met(ConnId(2), None))
    desk.copier.stuck = False
    desk.turn()
    desk.hear(Received(ConnId(2), CopyOut(7, ((1,),), ((1,),))))

    assert len(desk.stager) == 0
    assert desk.link.said()[-1] == CopyEnded(7, "")


def test_what_a_scheduler_does_not_say_to_this_worker_is_counted(desk):
    """And does no harm."""
    desk.order(Alive())

    assert desk.tally.take().counters == {"late_notifications": 1}


def test_home_is_called_again_after_a_pause():
    """Our scheduler starts to listen after us."""
    link = Link()
    home = Home(link, HOME, ATTEND)
    assert home.advance(now=5.0) is None
    home.say(Alive())
    assert not home.on(Failed(CONN, "refused"), now=5.0)
    assert home.advance(now=5.0) == 5.0 + RETRY
    assert home.advance(now=5.0 + RETRY) is None
    assert not home.on(Met(CONN, None), now=6.0)
    home.say(Alive())
    assert home.on(Lost(CONN, "reset"), now=7.0)
    home.say(Alive())
    assert home.advance(now=7.0) == 7.0 + RETRY

    assert link.met == [HOME, HOME]
    assert link.sent == [(CONN, ATTEND), (CONN, Alive())]
    assert not home.on(Received(CONN, Alive()), now=8.0)


def test_a_crew_knows_its_members_by_their_tokens():
    """Anybody who reaches the port could claim to be one."""
    link = Link()
    crew = Crew(link, {0: b"zero", 1: b"one"})
    assert not crew.admit(CONN, Attend(0, b"one"))
    assert not crew.admit(CONN, Attend(2, b"zero"))
    crew.tell(0, Alive())
    assert (link.sent, set(crew.ranks), crew.rank_of(CONN)) == ([], {0, 1}, None)
    assert crew.admit(CONN, Attend(0, b"zero"))
    crew.tell(0, Alive())

    assert (link.sent, crew.rank_of(CONN)) == ([(CONN, Alive())], 0)


def test_a_worker_that_comes_again_takes_its_own_place():
    """What the connection before still says, and its end, mean nothing any more."""
    crew = Crew(Link(), {0: b"zero"})
    crew.admit(CONN, Attend(0, b"zero"))
    crew.admit(ConnId(2), Attend(0, b"zero"))
    crew.leave(CONN)
    assert (crew.rank_of(CONN), crew.rank_of(ConnId(2))) == (None, 0)
    crew.leave(ConnId(2))

    assert crew.rank_of(ConnId(2)) is None
