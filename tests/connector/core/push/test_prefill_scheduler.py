"""P's scheduler between decode engines and its own workers: who may write, until when, and who hears of it."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, ConnId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseTable
from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.messages import (
    MAX_BLOCKS,
    MAX_FRAME,
    CancelPushes,
    Challenge,
    DropLeases,
    HeartbeatReply,
    LeasesLost,
    LentBlocks,
    PeerGone,
    PeerMemory,
    PushAborted,
    PushDone,
    PushStopped,
    PushWritten,
    RankMemory,
    RegisterPush,
    RenewLeases,
    StartPush,
    StopPush,
    WorkerHello,
    encode,
)
from pdrelay_connector.core.ports import ConnectionLost, MessageReceived
from pdrelay_connector.core.push import prefill_scheduler, remembered_transfers
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from support.engines import LEASE, changed, rank_info
from support.recording_link import RecordingLink

W0 = ConnId(1)
W1 = ConnId(2)
D = ConnId(3)
ELSE = ConnId(4)
T, R = RequestId("t"), RequestId("d-a")
PATIENCE = 100.0
TOKENS = {0: b"token0", 1: b"token1"}


class Harness:
    """The control thread of an engine with two ranks, and everybody who talks to it."""

    def __init__(self):
        self.link, self.counters, self.now = RecordingLink(), Counters(), 0.0
        self.one_engine = set()  # connections that have proven to be of one engine
        self.leases = LeaseTable(
            duration=LEASE, extension=LEASE * 2 / 3, same_engine=lambda a, b: {a, b} <= self.one_engine
        )
        self.lease_manager = LeaseManager(self.link, self.leases, self.counters)
        self.push_coordinator = PushCoordinator(
            self.link, self.lease_manager, self.counters, tokens=TOKENS, registration_timeout=PATIENCE
        )

    def hear(self, conn, *messages):
        for message in messages:
            self.push_coordinator.on(MessageReceived(conn, message), now=self.now)
        self.turn()

    def lose(self, conn):
        self.push_coordinator.on(ConnectionLost(conn, "closed"), now=self.now)
        self.turn()

    def turn(self):
        """As Control does it at the end of a turn."""
        self.lease_manager.advance(now=self.now)
        self.push_coordinator.advance(now=self.now)
        released = self.lease_manager.take_released()
        self.push_coordinator.released(released, now=self.now)
        self.ended = [(each.request, each.reason.name) for each in released]

    def attend(self, *ranks):
        for rank in ranks or (0, 1):
            self.hear((W0, W1)[rank], WorkerHello(rank, TOKENS[rank]))

    def introduce(self, conn=D, name="d"):
        self.hear(conn, *(RankMemory(rank_info(f"{name}/{rank}", rank=rank, ranks=2)) for rank in TOKENS))

    def register(self, conn=D, reader=R, request=T):
        order = RegisterPush(RequestId(reader), RequestId(request), "digest", (LentBlocks(0, 4, (BlockId(1),)),))
        self.hear(conn, order)
        return order

    def grant(self, request=T):
        self.lease_manager.grant(RequestId(request), now=self.now)
        self.push_coordinator.granted(RequestId(request), now=self.now)
        self.turn()

    def take_sent(self, *conns):
        """What was said since the last call, to these or to all."""
        sent = self.link.sent
        self.link.sent = []
        return [message if len(conns) == 1 else (conn, message) for conn, message in sent if conn in conns or not conns]

    def counted(self):
        return self.counters.take_report().counters


@pytest.fixture
def harness():
    """Both workers attend, a decode engine is known, and nothing of that is in the way."""
    harness = Harness()
    harness.attend()
    harness.introduce()
    harness.take_sent()
    return harness


# ---- the main path


def test_what_is_written_before_any_lease_does_not_count(harness):
    """A worker cannot know of a prefill's end before the engine; if it says so, nothing vouches for the blocks."""
    harness.register()
    harness.hear(W0, PushWritten(D, R))
    harness.hear(W1, PushWritten(D, R))

    assert harness.take_sent(D) == [PushDone(R, held=False)]


# ---- whose transfer it is


@pytest.mark.parametrize("claim", ["renew early", "renew", "register early", "register"])
def test_a_transfer_is_the_engines_that_spoke_of_it_first(harness, claim):
    """Whoever knows its name may neither claim it, nor end it, nor have its KV written into its own memory."""
    harness.introduce(ELSE, "e")
    if not claim.endswith("early"):
        harness.grant()
    harness.hear(D, RenewLeases((T,))) if claim.startswith("renew") else harness.register()
    owner = harness.push_coordinator._owner(T)
    harness.take_sent()
    harness.counted()
    harness.hear(ELSE, RenewLeases((T,)), DropLeases((T,)))
    harness.register(ELSE, "e-a")

    assert harness.push_coordinator._owner(T) == owner == D
    assert harness.take_sent(ELSE) == [
        LeasesLost((T,)),
        HeartbeatReply(),
        PushStopped("e-a", "transfer t is another decode engine's"),
    ]
    assert harness.counted()["foreign_messages"] == 3


# ---- early words


def test_the_latest_word_counts(harness):
    """A request that was given up may be tried again."""
    harness.hear(D, DropLeases((T,)), RenewLeases((T,)))
    harness.grant()

    assert T in harness.leases


def test_another_reader_still_wants_what_one_that_is_gone_does_not(harness):
    """Its registration is worth more than the other's silence."""
    harness.one_engine = {D, ELSE}
    harness.introduce(ELSE, "e")
    harness.register()
    harness.register(ELSE, reader="e-a")
    harness.lose(D)
    harness.grant()

    assert T in harness.leases


def test_words_about_transfers_that_never_come_are_forgotten(harness):
    """Routers fail between the legs."""
    harness.hear(D, RenewLeases((T,)))
    harness.now = PATIENCE / 2
    harness.hear(D, RenewLeases((RequestId("u"),)))
    harness.now = PATIENCE
    harness.turn()
    assert harness.push_coordinator._remembered._early.keys() == {"u"}
    harness.now = 2 * PATIENCE
    harness.turn()

    assert harness.push_coordinator._remembered._early == {}


def test_early_words_are_limited_to_the_latest(harness, monkeypatch):
    """A decode engine could otherwise fill our memory."""
    monkeypatch.setattr(remembered_transfers, "MAX_REMEMBERED", 3)
    harness.hear(D, RenewLeases(tuple(RequestId(str(number)) for number in range(9))))

    assert list(harness.push_coordinator._remembered._early) == ["6", "7", "8"]


# ---- a worker that connects again


def test_a_worker_hears_again_only_of_what_it_owes(harness):
    """What it has written, or will not write, may be another's by the time it would write it once more."""
    harness.register(reader="written")
    harness.register(reader="aborted", request="u")
    owed = harness.register(reader="owed", request="v")
    harness.hear(W0, PushWritten(D, RequestId("written")), PushAborted(D, RequestId("aborted"), "no room"))
    harness.lose(W0)
    harness.take_sent()
    harness.hear(ELSE, WorkerHello(0, TOKENS[0]))

    assert [message for message in harness.take_sent(ELSE) if not isinstance(message, PeerMemory)] == [
        StartPush(D, owed)
    ]


# ---- a decode engine that stops


def test_others_pushes_cannot_be_stopped(harness):
    """A reader's name means something only together with its connection."""
    harness.introduce(ELSE, "e")
    harness.register()
    harness.take_sent()
    harness.hear(ELSE, CancelPushes((R,)))

    assert harness.take_sent() == [(ELSE, PushStopped(R, ""))]


# ---- what is refused


def test_a_registration_without_the_memory_of_all_ranks_is_refused(harness):
    """A rank that nobody introduced could not be written to."""
    harness.register(ELSE)
    harness.hear(ELSE, RankMemory(rank_info("e/0", ranks=2)))
    harness.register(ELSE)

    assert harness.take_sent(ELSE) == [PushStopped(R, "the memory of the decode engine's ranks is not known")] * 2


def test_a_memory_of_a_rank_that_we_do_not_have_or_a_second_one_is_ignored(harness):
    """The workers know the first one, and may be writing there."""
    own = rank_info("d/0", ranks=2)
    harness.link.engines[D] = "d"
    harness.hear(
        D, RankMemory(rank_info("d/7", rank=7, ranks=2)), RankMemory(rank_info("other", ranks=2)), RankMemory(own)
    )

    assert harness.take_sent() == [(W0, PeerMemory(D, own, "d")), (W1, PeerMemory(D, own, "d"))]
    assert harness.counted()["unknown_transfer_messages"] == 2


def test_a_registration_that_comes_twice_is_one(harness):
    """It is answered once."""
    harness.register()
    harness.take_sent()
    harness.register(request="another")

    assert harness.take_sent() == []
    assert harness.counted()["unknown_transfer_messages"] == 1


def test_one_engines_registrations_are_limited(harness, monkeypatch):
    """It cannot use up what other engines need."""
    monkeypatch.setattr(prefill_scheduler, "MAX_PUSHES_PER_PEER", 1)
    harness.introduce(ELSE, "e")
    harness.register(reader="1")
    harness.take_sent()
    harness.register(reader="2", request="u")
    harness.register(ELSE, reader="3", request="v")

    assert harness.take_sent(D) == [PushStopped(RequestId("2"), "1 registrations of yours are open")]
    assert harness.take_sent(ELSE) == []
    assert harness.counted()["pushes_refused"] == 1


def test_registrations_are_limited(harness, monkeypatch):
    """Over all decode engines; one that ended makes room."""
    monkeypatch.setattr(prefill_scheduler, "MAX_PUSHES", 2)
    harness.register(reader="1")
    harness.register(reader="2", request="u")
    harness.take_sent()
    harness.register(reader="3")
    assert harness.take_sent() == [(D, PushStopped(RequestId("3"), "2 registrations are open"))]
    assert harness.counted()["pushes_refused"] == 1
    harness.hear(D, CancelPushes((RequestId("1"),)))
    harness.hear(W0, PushAborted(D, RequestId("1"), ""))
    harness.hear(W1, PushAborted(D, RequestId("1"), ""))
    harness.register(reader="3")

    assert [conn for conn, message in harness.take_sent() if isinstance(message, StartPush)] == [W0, W1]


@pytest.mark.parametrize(
    "message",
    [
        PushDone(R, held=True),
        Challenge(4, b""),
        PushWritten(D, R),
        StopPush(D, R),
        LeasesLost(()),
        WorkerHello(0, b"guess"),
    ],
)
def test_what_no_decode_engine_says_ends_its_connection(harness, message):
    """Only a worker that has attended may say that something is written."""
    harness.introduce(ELSE, "e")
    harness.register(ELSE)
    harness.grant()
    harness.take_sent()
    harness.hear(ELSE, message)

    assert harness.link.closed == [ELSE]
    assert harness.ended == [(T, "PEER_LOST")]
    assert (W0, PeerGone(ELSE)) in harness.take_sent()


@pytest.mark.parametrize(
    "attend", [WorkerHello(0, b""), WorkerHello(0, TOKENS[1]), WorkerHello(7, TOKENS[0])], ids=repr
)
def test_a_worker_hello_needs_the_token_of_its_rank(harness, attend):
    """It would decide what is called written."""
    harness.hear(ELSE, attend)
    harness.register()

    assert harness.link.closed == [ELSE]
    assert [conn for conn, _ in harness.take_sent()] == [W0, W1]


# ---- workers


def test_a_rank_that_never_attended_need_not_stop():
    """It cannot have written; one that did, or may have, must."""
    harness = Harness()
    harness.introduce()
    harness.attend(0)
    harness.register()
    harness.hear(D, CancelPushes((R,)))
    assert PushStopped not in [type(message) for message in harness.take_sent(D)]
    harness.hear(W0, PushAborted(D, R, ""))

    assert harness.take_sent(D) == [PushStopped(R, "the decode engine does not want it")]


def test_a_worker_that_is_away_may_still_write(harness):
    """Its connection is lost, not its life: PushStopped waits until it is back and has said so."""
    order = harness.register()
    harness.lose(W1)
    harness.take_sent()
    harness.hear(D, CancelPushes((R,)))
    harness.hear(W0, PushAborted(D, R, ""))
    assert harness.take_sent(D) == []
    harness.attend(1)
    known = [PeerMemory(D, rank_info(f"d/{rank}", rank=rank, ranks=2)) for rank in TOKENS]
    assert harness.take_sent() == [(W1, each) for each in (*known, StartPush(D, order), StopPush(D, R))]
    harness.hear(W1, PushAborted(D, R, ""))

    assert harness.take_sent(D) == [PushStopped(R, "the decode engine does not want it")]


def test_a_connection_that_another_of_the_same_rank_replaced_has_no_say(harness):
    """The worker is back before we heard that it was gone."""
    harness.register()
    back = ConnId(50)
    harness.hear(back, WorkerHello(1, TOKENS[1]))
    harness.take_sent()
    harness.hear(W1, PushWritten(D, R))
    assert harness.link.closed == [W1]
    harness.hear(back, PushWritten(D, R))
    harness.hear(W0, PushWritten(D, R))

    assert harness.take_sent(D) == [PushDone(R, held=False)]


@pytest.fixture
def known():
    """As ``harness``, with one push; the decode engine has proven who it is, over both of its connections."""
    harness = Harness()
    harness.link.engines = dict.fromkeys((D, ELSE), "d0")
    harness.attend()
    harness.introduce()
    harness.register()
    harness.take_sent()
    return harness


def reconnect(harness):
    """The decode engine is lost and comes back, and asks what became of its push."""
    harness.lose(D)
    harness.introduce(ELSE)
    harness.take_sent()
    harness.hear(ELSE, CancelPushes((R,)))


def test_a_decode_engine_that_is_back_hears_when_no_worker_writes_any_more(known):
    """Its blocks stay unused until then: one of the workers may hang for long."""
    reconnect(known)
    known.hear(W0, PushAborted(D, R, "gone"))
    assert known.take_sent() == []
    known.hear(W1, PushWritten(D, R))
    assert known.take_sent() == [(ELSE, PushStopped(R, "the connection was lost"))]
    known.hear(ELSE, CancelPushes((R,)))

    assert known.take_sent() == [(ELSE, PushStopped(R, ""))]


def test_what_is_over_when_a_decode_engine_comes_back_is_answered_at_once(known):
    """Also if one rank was when the connection ended."""
    known.hear(W0, PushWritten(D, R))
    known.lose(D)
    known.hear(W1, PushAborted(D, R, "gone"))
    known.introduce(ELSE)
    known.take_sent()
    known.hear(ELSE, CancelPushes((R,)))

    assert known.take_sent() == [(ELSE, PushStopped(R, ""))]


@pytest.mark.parametrize("engine", ["d1", None])
def test_another_decode_engine_hears_nothing_of_a_push_that_was_lost(known, engine):
    """It has no such request, whatever it is called."""
    known.link.engines[ELSE] = engine
    known.lose(D)
    known.take_sent()
    known.hear(ELSE, CancelPushes((R,)))
    assert known.take_sent() == [(ELSE, PushStopped(R, ""))]
    for worker in (W0, W1):
        known.hear(worker, PushAborted(D, R, "gone"))

    assert known.take_sent() == []


def test_a_worker_that_was_away_when_a_decode_engine_left_is_asked_when_it_is_back(known):
    """Its word may have been lost with its connection."""
    known.hear(W0, PushWritten(D, R))
    known.lose(W1)
    reconnect(known)
    known.attend(1)
    assert (W1, StopPush(D, R)) in known.take_sent()
    known.hear(W1, PushAborted(D, R, ""))

    assert known.take_sent() == [(ELSE, PushStopped(R, "the connection was lost"))]


def test_what_workers_still_write_for_engines_that_left_counts_against_the_limit(known, monkeypatch):
    """One that connects, registers and leaves again and again must not fill our memory."""
    monkeypatch.setattr(prefill_scheduler, "MAX_PUSHES", 1)
    known.lose(D)
    known.introduce(ELSE)
    known.take_sent()
    known.register(ELSE, "d-b", "u")
    assert known.take_sent(ELSE) == [PushStopped("d-b", "1 registrations are open")]
    for worker in (W0, W1):
        known.hear(worker, PushAborted(D, R, "gone"))
    known.register(ELSE, "d-b", "u")

    assert known.take_sent(ELSE) == []


def test_a_decode_engine_that_has_left_again_is_told_nothing(known):
    """And nothing of it is kept."""
    reconnect(known)
    known.lose(ELSE)
    known.take_sent()
    for worker in (W0, W1):
        known.hear(worker, PushAborted(D, R, "gone"))

    assert known.take_sent() == []
    assert known.push_coordinator._draining == {}


def test_nothing_is_left_when_everybody_has_left(harness):
    """Whatever they had asked for."""
    harness.register()
    harness.hear(D, RenewLeases((RequestId("u"),)))
    harness.lose(D)
    for worker in (W0, W1):
        harness.hear(worker, PushAborted(D, R, "the decode engine is gone"))
    harness.lose(W0)
    harness.now = 2 * PATIENCE
    harness.turn()

    assert len(harness.push_coordinator) == 0
    assert harness.push_coordinator._workers._conns == {1: W1}


# ---- messages as long as one may be: passed on to a worker, they would be longer


def introduce_large(harness, *, agent=b""):
    """A decode engine of one rank that has as many blocks as there may be."""
    rank = rank_info("e")
    (region,) = rank.regions
    rank = changed(rank, agent=agent or rank.agent, regions=(changed(region, count=MAX_BLOCKS),))
    harness.hear(ELSE, RankMemory(rank))
    return rank


def longest_registration():
    order = RegisterPush(R, T, "digest", (LentBlocks(0, 4, (BlockId(1),) * (MAX_FRAME // 2)),))
    blocks = (BlockId(1),) * (MAX_FRAME // 2 + MAX_FRAME - len(encode(order)))
    return changed(order, groups=(LentBlocks(0, 4, blocks),))


def test_a_registration_that_no_order_to_a_worker_can_hold_is_refused(harness):
    """The worker would close its connection, and get the order again over the next: it would push nothing any more."""
    introduce_large(harness)
    order = longest_registration()
    assert len(encode(order)) == MAX_FRAME
    harness.take_sent()
    harness.hear(ELSE, order)

    assert harness.take_sent() == [(ELSE, PushStopped(R, "it names more blocks than an order to a worker can"))]
    assert harness.counted()["pushes_refused"] == 1


def test_the_memory_of_a_rank_that_no_message_to_a_worker_can_hold_is_not_taken_in(harness):
    """The same: each worker would get it again and again."""
    harness.counted()
    short = introduce_large(harness)
    harness.lose(ELSE)
    harness.take_sent()
    agent = b"x" * (MAX_FRAME - len(encode(RankMemory(changed(short, agent=b"x" * MAX_FRAME)))) + MAX_FRAME)
    rank = introduce_large(harness, agent=agent)
    assert len(encode(RankMemory(rank))) == MAX_FRAME

    assert harness.take_sent() == []
    assert harness.counted()["unknown_transfer_messages"] == 1
    harness.register(ELSE)
    assert harness.take_sent(ELSE) == [PushStopped(R, "the memory of the decode engine's ranks is not known")]


# ---- an engine that is back before its connection ends


def test_a_decode_engine_that_is_back_early_replaces_its_earlier_connection(harness):
    """After a silent cut: the workers hear the end of the earlier one first, for NIXL attaches an agent once."""
    harness.grant()
    harness.hear(D, RenewLeases((T,)))
    harness.register()
    harness.take_sent()
    harness.one_engine = {D, ELSE}
    harness.hear(ELSE, RenewLeases((T,)))
    harness.introduce(ELSE)
    harness.register(ELSE, "d-b")

    told = harness.take_sent(W0)
    assert [type(message) for message in told] == [PeerGone, PeerMemory, PeerMemory, StartPush]
    assert (told[0].peer, told[-1].peer) == (D, ELSE)
    assert D in harness.link.closed
    assert harness.lease_manager.holds(T)  # it was renewed over the new connection
    harness.hear(W0, PushWritten(ELSE, RequestId("d-b")))
    harness.hear(W1, PushWritten(ELSE, RequestId("d-b")))
    assert not harness.lease_manager.holds(T)


def test_another_engine_that_tells_its_memory_disturbs_none(harness):
    """Whatever it calls itself: what counts is what the connections have proven."""
    harness.register()
    harness.take_sent()
    harness.introduce(ELSE)

    assert PeerGone(D) not in harness.take_sent(W0)
    assert D not in harness.link.closed


# ---- requests that are read, beside those that are pushed (mode auto)


def test_an_unknown_lease_that_was_to_be_read_is_lost_at_once(harness):
    """No prefill of it is to come: its decode engine computes the prompt, and does not read in vain."""
    harness.hear(D, RenewLeases((T,), pulled=True))

    assert harness.take_sent(D) == [LeasesLost((T,)), HeartbeatReply()]
    harness.grant()
    assert harness.lease_manager.leases.holder(T) is None


def test_a_lease_that_was_read_is_not_remembered(harness):
    """There are many, and none is waited for: they must not take the room of transfers."""
    harness.lease_manager.grant(T, now=harness.now)
    harness.turn()
    before = len(harness.push_coordinator)
    harness.hear(D, RenewLeases((T,), pulled=True), DropLeases((T, R), pulled=True))

    assert harness.ended == [(T, "DROPPED")]
    assert len(harness.push_coordinator) == before
