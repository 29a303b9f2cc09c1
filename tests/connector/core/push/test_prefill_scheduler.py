"""P's scheduler between decode engines and its own workers: who may write, until when, and who hears of it."""

import itertools

import pytest

from support.engines import LEASE, rank_info
from xpyd_connector.core.counters import Counters
from xpyd_connector.core.ids import BlockId, ConnId, RequestId
from xpyd_connector.core.lease.lease_table import LeaseTable
from xpyd_connector.core.lease.prefill_scheduler import LeaseManager, RevocableLease
from xpyd_connector.core.messages import (
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
    PushStalled,
    PushStopped,
    PushWritten,
    RankMemory,
    RegisterPush,
    RenewLeases,
    StartPush,
    StopPush,
    WorkerHello,
    WriteStalled,
)
from xpyd_connector.core.ports import ConnectionLost, MessageReceived, PeerConnected
from xpyd_connector.core.push import prefill_scheduler as pushes_module
from xpyd_connector.core.push.prefill_scheduler import TRANSITIONS, PushCoordinator, PushEvent, PushState, _Push
from xpyd_connector.errors import IllegalTransition

W0, W1, D, ELSE = ConnId(1), ConnId(2), ConnId(3), ConnId(4)
T, R = RequestId("t"), RequestId("d-a")
PATIENCE = 100.0
TOKENS = {0: b"token0", 1: b"token1"}


class Link:
    """Goes nowhere."""

    def __init__(self):
        self.sent, self.closed = [], []

    def send(self, conn, message):
        self.sent.append((conn, message))

    def close(self, conn):
        self.closed.append(conn)


class Desk:
    """The control thread of an engine with two ranks, and everybody who talks to it."""

    def __init__(self):
        self.link, self.counters, self.now = Link(), Counters(), 0.0
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
        self.ended = [(each.request, each.why.name) for each in released]

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

    def said(self, *conns):
        """What was said since the last call, to these or to all."""
        sent, self.link.sent = self.link.sent, []
        return [message if len(conns) == 1 else (conn, message) for conn, message in sent if conn in conns or not conns]

    def counted(self):
        return self.counters.take().counters


@pytest.fixture
def desk():
    """Both workers attend, a decode engine is known, and nothing of that is in the way."""
    desk = Desk()
    desk.attend()
    desk.introduce()
    desk.said()
    return desk


@pytest.mark.parametrize(("before", "event"), list(itertools.product(PushState, PushEvent)))
def test_every_cell_of_the_table(before, event):
    """What is not in the table is a bug and says so."""
    push = _Push(D, RegisterPush(R, T, None, (LentBlocks(0, 4, (BlockId(1),)),)), set(), before)
    if event in TRANSITIONS[before]:
        push.on(event)
        assert push.state is TRANSITIONS[before][event]
    else:
        with pytest.raises(IllegalTransition, match=f"d-a cannot handle {event.name} while {before.name}"):
            push.on(event)


# ---- the main path


@pytest.mark.parametrize("is_early", [True, False])
def test_a_registration_before_or_after_its_prefill_ends_with_the_last_rank(desk, is_early):
    """Only then the bytes are complete; and the lease ends with it."""
    if not is_early:
        desk.grant()
    order = desk.register()
    assert desk.said() == [(W0, StartPush(D, order)), (W1, StartPush(D, order))]
    if is_early:
        desk.grant()
    desk.hear(W1, PushWritten(D, R))
    desk.hear(W1, PushWritten(D, R))
    assert desk.said() == []
    desk.hear(W0, PushWritten(D, R))

    assert desk.said(D) == [PushDone(R, held=True)]
    assert desk.ended == [(T, "DONE")]
    assert desk.push_coordinator._by_request == {}


def test_what_is_written_after_its_lease_does_not_count(desk):
    """The blocks were others' while they were read."""
    desk.register()
    desk.grant()
    desk.now = LEASE
    desk.push_coordinator.on(MessageReceived(W0, PushWritten(D, R)), now=LEASE)
    desk.push_coordinator.on(MessageReceived(W1, PushWritten(D, R)), now=LEASE)

    assert desk.said(D) == [PushDone(R, held=False)]


def test_what_is_written_before_any_lease_does_not_count(desk):
    """A worker cannot know of a prefill's end before the engine; if it says so, nothing vouches for the blocks."""
    desk.register()
    desk.hear(W0, PushWritten(D, R))
    desk.hear(W1, PushWritten(D, R))

    assert desk.said(D) == [PushDone(R, held=False)]


def test_several_readers_of_one_transfer_end_its_lease_with_the_last_of_them(desk):
    """One prompt, n answers, over one connection of a decode engine or over two."""
    desk.one_engine = {D, ELSE}
    desk.introduce(ELSE, "e")
    desk.register()
    desk.register(ELSE)
    desk.register(reader="d-b")
    desk.grant()
    desk.said()
    for conn, reader in ((D, R), (ELSE, R), (D, RequestId("d-b"))):
        assert T in desk.leases
        desk.hear(W0, PushWritten(conn, reader))
        desk.hear(W1, PushWritten(conn, reader))

    assert [conn for conn, _ in desk.said(D, ELSE)] == [D, ELSE, D]
    assert T not in desk.leases


# ---- whose transfer it is


@pytest.mark.parametrize("claim", ["renew early", "renew", "register early", "register"])
def test_a_transfer_is_the_engines_that_spoke_of_it_first(desk, claim):
    """Whoever knows its name may neither claim it, nor end it, nor have its KV written into its own memory."""
    desk.introduce(ELSE, "e")
    if not claim.endswith("early"):
        desk.grant()
    desk.hear(D, RenewLeases((T,))) if claim.startswith("renew") else desk.register()
    owner = desk.push_coordinator._owner(T)
    desk.said()
    desk.counted()
    desk.hear(ELSE, RenewLeases((T,)), DropLeases((T,)))
    desk.register(ELSE, "e-a")

    assert desk.push_coordinator._owner(T) == owner == D
    assert desk.said(ELSE) == [
        LeasesLost((T,)),
        HeartbeatReply(),
        PushStopped("e-a", "transfer t is another decode engine's"),
    ]
    assert desk.counted()["foreign_messages"] == 3


def test_a_transfer_is_anybodys_again_when_the_engine_that_spoke_of_it_is_gone(desk):
    """A router tries again with another decode engine."""
    desk.introduce(ELSE, "e")
    desk.hear(D, RenewLeases((T,)))
    desk.lose(D)
    desk.register(ELSE, "e-a")

    assert desk.push_coordinator._owner(T) == ELSE


def test_a_transfer_that_is_over_is_said_to_have_lapsed(desk):
    """Its decode engine, whose request still waits, computes the prompt itself, instead of registering in vain."""
    desk.grant()
    desk.lease_manager.revoke([RevocableLease(T, 1)], 1, now=desk.now)
    desk.turn()
    desk.said()
    desk.hear(D, RenewLeases((T,)))

    assert desk.said(D) == [LeasesLost((T,)), HeartbeatReply()]


def test_what_is_being_written_is_not_revoked(desk):
    """The control thread asks before it revokes."""
    assert not desk.push_coordinator.is_writing(T)
    desk.register()

    assert desk.push_coordinator.is_writing(T)


# ---- early words


@pytest.mark.parametrize("word", ["renew", "register"])
def test_a_lease_is_claimed_by_whoever_spoke_up_before(desk, word):
    """So that it ends with that engine's connection, not only at lease end."""
    desk.hear(D, RenewLeases((T,))) if word == "renew" else desk.register()
    desk.grant()
    desk.lose(D)

    assert desk.ended == [(T, "PEER_LOST")]


def test_what_nobody_wants_any_more_is_freed_as_soon_as_it_is_computed(desk):
    """The client left while its prompt was computed."""
    desk.hear(D, RenewLeases((T,)), DropLeases((T,)))
    desk.lease_manager.grant(T, now=0.0)
    desk.push_coordinator.granted(T, now=0.0)
    desk.turn()

    assert desk.ended == [(T, "DROPPED")]
    assert desk.push_coordinator._early == {}


def test_the_latest_word_counts(desk):
    """A request that was given up may be tried again."""
    desk.hear(D, DropLeases((T,)), RenewLeases((T,)))
    desk.grant()

    assert T in desk.leases


@pytest.mark.parametrize("has_registered", [True, False])
def test_a_decode_engine_that_is_gone_wants_nothing(desk, has_registered):
    """What it asked for is freed as soon as it is computed."""
    desk.hear(D, RenewLeases((T,)))
    if has_registered:
        desk.register()
    desk.lose(D)
    desk.grant()

    assert desk.ended == [(T, "DROPPED")]


def test_another_reader_still_wants_what_one_that_is_gone_does_not(desk):
    """Its registration is worth more than the other's silence."""
    desk.one_engine = {D, ELSE}
    desk.introduce(ELSE, "e")
    desk.register()
    desk.register(ELSE, reader="e-a")
    desk.lose(D)
    desk.grant()

    assert T in desk.leases


def test_a_heartbeat_is_always_answered(desk):
    """Whether leases run or not: a decode engine that waits learns that we live. Nothing lapses in push."""
    desk.grant()
    desk.hear(D, RenewLeases((T, RequestId("u"))))

    assert desk.said() == [(D, HeartbeatReply())]
    assert LeasesLost not in map(type, desk.said())


def test_words_about_transfers_that_never_come_are_forgotten(desk):
    """Routers fail between the legs."""
    desk.hear(D, RenewLeases((T,)))
    desk.now = PATIENCE / 2
    desk.hear(D, RenewLeases((RequestId("u"),)))
    desk.now = PATIENCE
    desk.turn()
    assert desk.push_coordinator._early.keys() == {"u"}
    desk.now = 2 * PATIENCE
    desk.turn()

    assert desk.push_coordinator._early == {}


def test_early_words_are_limited_to_the_latest(desk, monkeypatch):
    """A decode engine could otherwise fill our memory."""
    monkeypatch.setattr(pushes_module, "MAX_PUSHES", 3)
    desk.hear(D, RenewLeases(tuple(RequestId(str(number)) for number in range(9))))

    assert list(desk.push_coordinator._early) == ["6", "7", "8"]


# ---- the end of a prefill without its KV


def test_an_abandoned_prefill_stops_its_readers(desk):
    """When the workers have, and not before."""
    desk.register()
    desk.said()
    desk.push_coordinator.abandoned(T, now=0.0)
    assert desk.said(W0) == [StopPush(D, R)]
    desk.hear(W0, PushAborted(D, R, "x"))
    assert desk.said() == []
    desk.hear(W1, PushAborted(D, R, "y"))

    assert desk.said(D) == [PushStopped(R, "the prefill ended without handing its KV over")]


def test_a_lease_that_ends_stops_its_readers(desk):
    """With the reason; whatever was still written meanwhile is thrown away."""
    desk.register()
    desk.grant()
    desk.said()
    desk.now = LEASE
    desk.turn()
    desk.hear(W0, PushWritten(D, R))
    desk.hear(W1, PushAborted(D, R, "forgotten"))

    assert desk.said(D) == [PushStopped(R, "its lease is over (expired)", lease_lost=True)]


# ---- a decode engine that stops


def test_stop_is_answered_when_no_rank_writes(desk):
    """Whether a rank had written everything before, or stops: that decides nothing any more."""
    desk.register()
    desk.grant()
    desk.hear(W0, PushWritten(D, R))
    desk.said()
    desk.hear(D, CancelPushes((R,)), CancelPushes((R,)))
    assert desk.said() == [(W1, StopPush(D, R))]
    desk.hear(W1, PushWritten(D, R))

    assert desk.said(D) == [PushStopped(R, "the decode engine does not want it")]


def test_stop_of_what_is_over_or_unknown_is_answered_at_once(desk):
    """The decode engine keeps its blocks out of reach until it hears."""
    desk.hear(D, CancelPushes((R,)))
    desk.hear(ConnId(99), CancelPushes((R,)))

    assert desk.said() == [(D, PushStopped(R, "")), (ConnId(99), PushStopped(R, ""))]


def test_others_pushes_cannot_be_stopped(desk):
    """A reader's name means something only together with its connection."""
    desk.introduce(ELSE, "e")
    desk.register()
    desk.said()
    desk.hear(ELSE, CancelPushes((R,)))

    assert desk.said() == [(ELSE, PushStopped(R, ""))]


def test_a_decode_engine_that_leaves_is_forgotten_and_the_workers_are_told(desk):
    """What they say of it afterwards is late."""
    desk.register()
    desk.said()
    desk.lose(D)
    assert desk.said() == [(W0, PeerGone(D)), (W1, PeerGone(D))]
    desk.hear(W0, PushWritten(D, R), PushAborted(D, R, ""))
    desk.hear(W1, WriteStalled(D, R, ""))

    assert desk.said() == []
    assert desk.push_coordinator._peers == desk.push_coordinator._by_request == {}


# ---- what is refused


def test_a_registration_without_the_memory_of_all_ranks_is_refused(desk):
    """A rank that nobody introduced could not be written to."""
    desk.register(ELSE)
    desk.hear(ELSE, RankMemory(rank_info("e/0", ranks=2)))
    desk.register(ELSE)

    assert desk.said(ELSE) == [PushStopped(R, "the memory of the decode engine's ranks is not known")] * 2


def test_a_memory_of_a_rank_that_we_do_not_have_or_a_second_one_is_ignored(desk):
    """The workers know the first one, and may be writing there."""
    own = rank_info("d/0", ranks=2)
    desk.hear(
        D, RankMemory(rank_info("d/7", rank=7, ranks=2)), RankMemory(rank_info("other", ranks=2)), RankMemory(own)
    )

    assert desk.said() == [(W0, PeerMemory(D, own)), (W1, PeerMemory(D, own))]
    assert desk.counted()["unknown_transfer_messages"] == 2


def test_a_registration_that_comes_twice_is_one(desk):
    """It is answered once."""
    desk.register()
    desk.said()
    desk.register(request="another")

    assert desk.said() == []
    assert desk.counted()["unknown_transfer_messages"] == 1


def test_one_engines_registrations_are_limited(desk, monkeypatch):
    """It cannot use up what other engines need."""
    monkeypatch.setattr(pushes_module, "MAX_PUSHES_PER_PEER", 1)
    desk.introduce(ELSE, "e")
    desk.register(reader="1")
    desk.said()
    desk.register(reader="2", request="u")
    desk.register(ELSE, reader="3", request="v")

    assert desk.said(D) == [PushStopped(RequestId("2"), "1 registrations of yours are open")]
    assert desk.said(ELSE) == []
    assert desk.counted()["pushes_refused"] == 1


def test_registrations_are_limited(desk, monkeypatch):
    """Over all decode engines; one that ended makes room."""
    monkeypatch.setattr(pushes_module, "MAX_PUSHES", 2)
    desk.register(reader="1")
    desk.register(reader="2", request="u")
    desk.said()
    desk.register(reader="3")
    assert desk.said() == [(D, PushStopped(RequestId("3"), "2 registrations are open"))]
    assert desk.counted()["pushes_refused"] == 1
    desk.hear(D, CancelPushes((RequestId("1"),)))
    desk.hear(W0, PushAborted(D, RequestId("1"), ""))
    desk.hear(W1, PushAborted(D, RequestId("1"), ""))
    desk.register(reader="3")

    assert [conn for conn, message in desk.said() if isinstance(message, StartPush)] == [W0, W1]


@pytest.mark.parametrize(
    "message", [PushDone(R, held=True), Challenge(4, b""), PushWritten(D, R), StopPush(D, R), LeasesLost(())]
)
def test_what_no_decode_engine_says_ends_its_connection(desk, message):
    """Only a worker that has attended may say that something is written."""
    desk.introduce(ELSE, "e")
    desk.register(ELSE)
    desk.grant()
    desk.said()
    desk.hear(ELSE, message)

    assert desk.link.closed == [ELSE]
    assert desk.ended == [(T, "PEER_LOST")]
    assert (W0, PeerGone(ELSE)) in desk.said()


@pytest.mark.parametrize(
    "attend", [WorkerHello(0, b""), WorkerHello(0, TOKENS[1]), WorkerHello(7, TOKENS[0])], ids=repr
)
def test_nobody_attends_without_the_token_of_that_rank(desk, attend):
    """It would decide what is called written."""
    desk.hear(ELSE, attend)
    desk.register()

    assert desk.link.closed == [ELSE]
    assert [conn for conn, _ in desk.said()] == [W0, W1]


def test_a_decode_engine_that_tries_to_attend_is_gone_with_everything(desk):
    """Its connection is closed, so nothing else will ever tell that it left: whoever wrote to it would go on."""
    desk.register()
    desk.grant()
    desk.said()
    desk.hear(D, WorkerHello(0, b"guess"))

    assert desk.link.closed == [D]
    assert desk.push_coordinator._peers == desk.push_coordinator._by_request == {}
    assert desk.ended == [(T, "PEER_LOST")]


def test_news_of_connections_that_we_opened_are_not_for_us(desk):
    """They are the borrower's."""
    desk.push_coordinator.on(PeerConnected(D, None), now=0.0)

    assert desk.said() == []


# ---- workers


def test_a_write_that_hangs_is_told_at_once_and_stops_the_others(desk):
    """The request need not wait; its blocks must, until every rank has let go."""
    desk.register()
    desk.said()
    desk.hear(W0, WriteStalled(D, R, "slow"))
    assert desk.said() == [(D, PushStalled(R, "slow")), (W0, StopPush(D, R)), (W1, StopPush(D, R))]
    desk.hear(W1, PushAborted(D, R, ""))
    assert desk.said() == []
    desk.hear(W0, PushAborted(D, R, "slow"))

    assert desk.said() == [(D, PushStopped(R, "slow"))]


def test_one_rank_that_fails_stops_the_others(desk):
    """A part of the KV is worth nothing; the first reason is told."""
    desk.register()
    desk.said()
    desk.hear(W0, PushAborted(D, R, "NIXL: no route"))
    assert desk.said() == [(W1, StopPush(D, R))]
    desk.hear(W1, PushAborted(D, R, ""))

    assert desk.said() == [(D, PushStopped(R, "NIXL: no route"))]


def test_workers_that_come_later_hear_everything_that_was_said_before():
    """Decode engines may be faster than our own workers."""
    desk = Desk()
    desk.introduce()
    order = desk.register()
    assert desk.said() == []
    desk.attend()

    known = [PeerMemory(D, rank_info(f"d/{rank}", rank=rank, ranks=2)) for rank in TOKENS]
    assert desk.said() == [(worker, each) for worker in (W0, W1) for each in (*known, StartPush(D, order))]


def test_a_rank_that_never_attended_need_not_stop():
    """It cannot have written; one that did, or may have, must."""
    desk = Desk()
    desk.introduce()
    desk.attend(0)
    desk.register()
    desk.hear(D, CancelPushes((R,)))
    assert PushStopped not in [type(message) for message in desk.said(D)]
    desk.hear(W0, PushAborted(D, R, ""))

    assert desk.said(D) == [PushStopped(R, "the decode engine does not want it")]


def test_a_worker_that_is_away_may_still_write(desk):
    """Its connection is lost, not its life: PushStopped waits until it is back and has said so."""
    order = desk.register()
    desk.lose(W1)
    desk.said()
    desk.hear(D, CancelPushes((R,)))
    desk.hear(W0, PushAborted(D, R, ""))
    assert desk.said(D) == []
    desk.attend(1)
    known = [PeerMemory(D, rank_info(f"d/{rank}", rank=rank, ranks=2)) for rank in TOKENS]
    assert desk.said() == [(W1, each) for each in (*known, StartPush(D, order), StopPush(D, R))]
    desk.hear(W1, PushAborted(D, R, ""))

    assert desk.said(D) == [PushStopped(R, "the decode engine does not want it")]


def test_a_connection_that_another_of_the_same_rank_replaced_has_no_say(desk):
    """The worker is back before we heard that it was gone."""
    desk.register()
    back = ConnId(50)
    desk.hear(back, WorkerHello(1, TOKENS[1]))
    desk.said()
    desk.hear(W1, PushWritten(D, R))
    assert desk.link.closed == [W1]
    desk.hear(back, PushWritten(D, R))
    desk.hear(W0, PushWritten(D, R))

    assert desk.said(D) == [PushDone(R, held=False)]


def test_a_transfer_that_was_handed_over_is_not_waited_for(desk):
    """One prompt, n answers: the one that registers after the others were served must recompute, not wait."""
    desk.register()
    desk.grant()
    desk.hear(W0, PushWritten(D, R))
    desk.hear(W1, PushWritten(D, R))
    desk.said()
    desk.register(reader="d-b")

    assert [type(message) for message in desk.said(D)] in ([PushStopped], [PushDone])


def test_nothing_is_left_when_everybody_has_left(desk):
    """Whatever they had asked for."""
    desk.register()
    desk.hear(D, RenewLeases((RequestId("u"),)))
    desk.lose(D)
    desk.lose(W0)
    desk.now = 2 * PATIENCE
    desk.turn()

    assert len(desk.push_coordinator) == 0
    assert desk.push_coordinator._workers._conns == {1: W1}
