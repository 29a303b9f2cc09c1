"""Lending blocks to P: the rules that the stories of ``push/test_push_pair.py`` do not show."""

import pytest

from pdrelay_connector.core.ids import ConnId, EngineId, RequestId
from pdrelay_connector.core.lease.kv_params import PushParams
from pdrelay_connector.core.messages import (
    MAX_FRAME,
    PROTOCOL,
    CancelPushes,
    DropLeases,
    FenceResult,
    HeartbeatReply,
    PushDone,
    PushStalled,
    PushStopped,
    RenewLeases,
    Welcome,
)
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.core.push.expected_push import ReceiveState
from pdrelay_connector.core.push.lost_peer import LOCAL_QUARANTINE, LONG_QUARANTINE, QUARANTINE
from pdrelay_connector.core.results import BlocksReleased, LoadResult
from pdrelay_connector.core.session.peers import MAX_BACKOFF, QUIET, PeerState
from pdrelay_connector.errors import IllegalTransition
from pdrelay_connector.io.client_connections import IDLE_TIMEOUT
from support.engines import FINGERPRINT, changed, rank_info
from support.expecting import ADDRESS, A, B, ExpectingEngine, P, T
from support.push_engines import WAIT


class Harness(ExpectingEngine):
    """One whose turns a test takes."""

    def lose(self, *, silent=False, reset=False):
        self.happen(ConnectionLost(self.conn, "closed", silent, reset))

    def meet(self, engine, fingerprint=FINGERPRINT, rank=rank_info("p")):  # noqa: B008 (it is frozen)
        """An engine answers at P's address."""
        self.expect(B, engine=engine)
        conn = self.peers.get(engine).conn
        self.happen(PeerConnected(conn, Welcome(PROTOCOL, engine, fingerprint, (rank,)), is_elsewhere=True))

    def hear(self, message, conn=None):
        return self.push_receiver.on(conn or self.conn, message)

    def wait(self, seconds):
        self.now += seconds
        return self.push_receiver.advance(now=self.now)

    def take_results(self):
        return self.push_receiver.take_results()

    def take_sent(self):
        """What was said since the last call; what is given back is said at the end of a turn."""
        self.lease_renewer._send_pending()
        sent = self.link.sent
        self.link.sent = []
        return [message for _, message in sent]

    def state(self, request=A):
        return self.push_receiver._pushes[request].state

    def counted(self):
        return self.counters.take_report().counters


@pytest.fixture
def harness():
    """One request is registered, and nothing of that is in the way."""
    harness = Harness()
    harness.expect()
    harness.connect()
    harness.take_sent()
    harness.counters.take_report()
    return harness


# ---- registering


def test_a_request_is_registered_once(harness):
    """Two pushes into the same blocks would overtake each other."""
    with pytest.raises(IllegalTransition, match="d-a is registered twice"):
        harness.expect()


def test_an_engine_that_cannot_be_met_fails_what_waits_for_it_and_what_comes_next():
    """Nothing was lent, so nothing lingers."""
    harness = Harness()
    harness.expect()
    harness.happen(ConnectFailed(harness.conn, "no route"))
    harness.expect(B)  # it is tried again at once
    harness.happen(ConnectFailed(harness.conn, "no route"))

    assert harness.take_results() == [
        LoadResult(A, f"{ADDRESS} was not met: no route"),
        LoadResult(B, f"{ADDRESS} was not met: no route"),
    ]
    assert len(harness.push_receiver) == len(harness.lease_renewer) == 0
    assert harness.counted()["loads_failed_handshake"] == 2


# ---- a connection that was quiet for long


@pytest.fixture
def quiet():
    """P has been met, and nothing was wanted of it since; it may close the connection in this very moment."""
    harness = Harness()
    harness.expect()
    harness.connect()
    harness.hear(PushDone(A, held=True))
    harness.take_results()
    harness.take_sent()
    harness.counters.take_report()
    harness.now += QUIET
    harness.expect(B)
    return harness


def test_what_is_aborted_before_a_quiet_p_answers_is_not_registered(quiet):
    """It was never lent."""
    quiet.push_receiver.stop(B)
    assert quiet.take_results() == [LoadResult(B, "the request was aborted")]
    quiet.take_sent()
    quiet.push_receiver.stop(B)  # it is over
    quiet.hear(HeartbeatReply())

    assert quiet.take_sent() == []


def test_a_connection_counts_as_quiet_long_before_p_closes_it():
    """Else the race would only be rarer."""
    assert QUIET <= IDLE_TIMEOUT / 2


# ---- the ends that P tells


@pytest.mark.parametrize(
    ("end", "failure", "counters"),
    [
        (PushDone(A, held=True), "", {"loads": 1}),
        (
            PushDone(A, held=False),
            "its lease was over before everything was written",
            {"reads_discarded": 1, "loads_failed_lease": 1},
        ),
        (PushStopped(A, "no prompt"), "P stopped: no prompt", {"loads_failed_transfer": 1}),
    ],
    ids=repr,
)
def test_p_says_how_it_ends(harness, end, failure, counters):
    """What was written after the lease is worth nothing; nothing lingers, and nobody renews any more."""
    assert harness.hear(end)

    assert harness.take_results() == [LoadResult(A, failure)]
    assert harness.take_results() == []
    assert len(harness.push_receiver) == len(harness.lease_renewer) == 0
    assert harness.counted() == counters


@pytest.mark.parametrize("end", [PushStopped(A, "slow"), PushDone(A, held=True), PushDone(A, held=False)], ids=repr)
def test_stuck_fails_the_request_at_once_and_frees_its_blocks_later(harness, end):
    """P may write into them until it says otherwise; whatever it says then, the request has failed."""
    harness.hear(PushStalled(A, "slow"))
    assert harness.take_results() == [LoadResult(A, "slow", quarantined=True)]
    assert harness.take_sent() == [CancelPushes((A,)), DropLeases((T,))]
    harness.hear(PushStalled(A, "slow"))
    assert harness.take_results() == []
    assert harness.wait(1e6) is None
    harness.hear(end)

    assert harness.take_results() == [BlocksReleased(A)]
    assert len(harness.push_receiver) == 0
    assert harness.counted() == {"drops_sent": 1, "loads_failed_timeout": 1}


@pytest.mark.parametrize("message", [PushDone(A, held=True), PushStopped(A, ""), PushStalled(A, "")], ids=repr)
def test_messages_of_other_connections_change_nothing(harness, message):
    """Another engine, one we do not know, or the right one much too late."""
    harness.lease_renewer.start_renewing(B, PushParams(EngineId("p1"), "10.0.0.1", 5601, T, T), now=0.0)
    other = harness.peers.get(EngineId("p1")).conn
    harness.happen(PeerConnected(other, Welcome(PROTOCOL, EngineId("p1"), FINGERPRINT, (rank_info("p1"),))))
    for conn in (other, ConnId(99)):
        assert harness.hear(message, conn)
    assert harness.take_results() == []
    harness.hear(PushDone(A, held=True))
    harness.take_results()
    harness.hear(message)

    assert harness.take_results() == []
    assert harness.counted()["unknown_transfer_messages"] == 3


# ---- the ends that D decides


def test_nothing_is_waited_for_longer_than_the_timeout(harness):
    """From the moment the blocks were lent."""
    harness.happen(MessageReceived(harness.conn, HeartbeatReply()))
    assert harness.wait(WAIT - 1) == WAIT
    assert harness.take_results() == []
    harness.wait(1)

    assert harness.take_results() == [LoadResult(A, "nothing was written within 100 s", quarantined=True)]


# ---- P is gone


@pytest.mark.parametrize(
    ("quarantine", "seconds"), [(LONG_QUARANTINE, 924.6), (QUARANTINE, 102.2), (LOCAL_QUARANTINE, -10)]
)
def test_a_quarantine_outlasts_tcp(quarantine, seconds):
    """Linux sends again for so long what a process, or one that has died, had sent into a cut (tcp_retries2, 0.2 s)."""
    interval, looks = quarantine

    assert interval * looks > seconds + 10
    assert looks > 10  # those of a process that was stopped count when it runs again


@pytest.mark.parametrize(("is_elsewhere", "quarantine"), [(True, QUARANTINE), (False, LOCAL_QUARANTINE)])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_dead_p_of_the_same_machine_has_sent_nothing_into_a_cut(is_elsewhere, quarantine, is_reset):
    """Its blocks are back in seconds; between machines what was cut off may come as late as its kernel sends it."""
    harness = Harness()
    harness.expect()
    harness.connect(is_elsewhere=is_elsewhere)
    harness.lose(silent=is_reset, reset=is_reset)
    if is_reset:
        harness.happen(ConnectFailed(harness.conn, "refused", has_ended=True))
    harness.take_results()
    interval, looks = quarantine
    for _ in range(looks):
        assert harness.take_results() == []
        harness.wait(interval)

    assert harness.take_results() == [BlocksReleased(A)]


@pytest.mark.parametrize("how", [{}, {"silent": True}, {"silent": True, "reset": True}], ids=repr)
def test_a_p_that_is_back_is_asked_whether_it_still_writes(harness, how):
    """It lives: what its workers do, and for how long one of them hangs, it alone knows."""
    harness.lose(**how)
    harness.take_results()
    harness.expect(B)
    harness.connect()
    assert harness.state(A) is ReceiveState.STOPPING
    assert CancelPushes((A,)) in harness.take_sent()
    for _ in range(LONG_QUARANTINE[1] + 1):
        harness.wait(LONG_QUARANTINE[0])
    harness.hear(PushStalled(A, ""))
    harness.push_receiver.stop(A)
    assert BlocksReleased(A) not in harness.take_results()
    harness.hear(PushStopped(A, ""))

    assert harness.take_results() == [BlocksReleased(A)]


def test_a_p_that_is_lost_again_before_it_has_answered_may_still_write(harness):
    """As after the first time."""
    harness.lose(silent=True)
    harness.expect(B)
    harness.connect()
    harness.lose(silent=True)

    assert harness.state(A) is ReceiveState.QUARANTINED
    assert harness.push_receiver._lost_peers._lost[A].checks == LONG_QUARANTINE[1]


@pytest.mark.parametrize("is_reset", [False, True])
def test_another_process_under_the_same_engine_id_is_no_p_that_is_back(harness, is_reset):
    """An operator may have chosen the id: the new process knows nothing of what the old one had sent."""
    harness.lose(silent=is_reset, reset=is_reset)
    harness.take_results()
    harness.meet(P, rank=rank_info("another"))
    harness.hear(PushStopped(A, ""))
    interval, looks = QUARANTINE
    for _ in range(looks):
        assert BlocksReleased(A) not in harness.take_results()
        assert harness.state() is ReceiveState.QUARANTINED
        harness.wait(interval)

    assert BlocksReleased(A) in harness.take_results()


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("fingerprint", [FINGERPRINT, changed(FINGERPRINT, weights="others")], ids=["same", "differs"])
def test_a_p_whose_place_another_takes_has_died_if_its_kernel_says_so(harness, is_reset, fingerprint):
    """A process that was killed with bytes unread ends in a reset; its blocks must not wait for a cut to mend.

    Whether that other engine's KV can be loaded makes no difference. Without a word of that kernel P may live on a host
    that is cut off, while another has its address.
    """
    interval, looks = QUARANTINE
    harness.lose(silent=True, reset=is_reset)
    harness.take_results()
    harness.wait(3 * LONG_QUARANTINE[0])
    assert harness.state() is ReceiveState.QUARANTINED
    harness.meet(EngineId("p1"), fingerprint)
    for _ in range(looks):
        assert harness.state() is ReceiveState.QUARANTINED
        harness.wait(interval)

    assert (BlocksReleased(A) in harness.take_results()) == is_reset


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_p_whose_connection_was_reset_has_died_if_its_port_is_closed(harness, has_ended):
    """No answer is no proof: P may be stopped, or cut off again. A fresh answer is none either: D may read it late."""
    harness.happen(MessageReceived(harness.conn, HeartbeatReply()))
    harness.lose(silent=True, reset=True)
    harness.take_results()
    harness.happen(ConnectFailed(harness.conn, "timed out", has_ended=has_ended))
    for _ in range(QUARANTINE[1]):
        harness.wait(QUARANTINE[0])

    assert harness.take_results() == [BlocksReleased(A)] * has_ended


def test_what_became_of_a_p_is_asked_until_it_is_known(harness):
    """The port of a process that ends may still be open, and the next engine there starts minutes later."""
    harness.lose(silent=True, reset=True)
    harness.take_results()
    for _ in range(20):
        harness.happen(ConnectFailed(harness.conn, "it closed the connection"))
        harness.wait(max(LONG_QUARANTINE[0], MAX_BACKOFF))
        assert harness.peers.get(P).state is PeerState.CONNECTING
    harness.happen(ConnectFailed(harness.conn, "another one does", is_incompatible=True, has_ended=True))
    asked = len(harness.link.met)
    for _ in range(QUARANTINE[1]):
        harness.wait(QUARANTINE[0])

    assert harness.take_results() == [BlocksReleased(A)]
    assert len(harness.link.met) == asked


def test_a_p_that_closed_its_connection_is_not_asked(harness):
    """That leaves no doubt."""
    harness.lose()

    assert harness.peers.get(P) is None


def test_a_connection_that_is_reset_again_and_again_is_opened_once_for_each_request(harness):
    """D must not turn in a circle with what resets it: each request has its end at once, and no block waits longer."""
    before = len(harness.link.met)
    for number in range(50):
        harness.lose(silent=True, reset=True)
        harness.connect()  # the request before has asked: P lives
        harness.lose(silent=True, reset=True)
        harness.expect(RequestId(f"d-{number}"), blocks=())
        harness.connect()
    harness.lose(silent=True, reset=True)
    harness.connect()

    assert len(harness.link.met) - before == 2 * 50 + 1
    assert len(harness.take_results()) == 51
    harness.lose(silent=True, reset=True)
    for _ in range(LONG_QUARANTINE[1]):
        harness.wait(LONG_QUARANTINE[0])
    assert len(harness.push_receiver) == 0
    assert len(harness.link.met) - before == 2 * 50 + 2


def test_a_p_that_breaks_the_protocol_may_live(harness):
    """We close the connection, and know nothing of what it goes on to write."""
    conn = harness.conn
    harness.happen(MessageReceived(conn, FenceResult(A, held=True)))

    assert harness.link.closed == [conn]
    assert harness.take_results()[0].quarantined
    assert harness.push_receiver._lost_peers._lost[A].checks == LONG_QUARANTINE[1]


def test_a_push_whose_blocks_no_message_can_name_is_not_registered(harness):
    """P would close the connection, and with it every other push of this engine would fail."""
    harness.take_sent()
    harness.expect(B, blocks=range(1, MAX_FRAME // 3 + 1))

    (result,) = harness.take_results()
    assert (result.request, result.quarantined) == (B, False)
    assert "in one message" in result.failure
    assert harness.take_sent() == [RenewLeases((T,))]
    assert len(harness.push_receiver) == 1
