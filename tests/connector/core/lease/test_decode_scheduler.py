"""Borrowing: the rules that the stories of ``pull/test_pull_pair.py`` do not show."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, EngineId, RequestId
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.kv_params import PullParams, PushParams
from pdrelay_connector.core.messages import (
    MAX_IDS,
    PROTOCOL,
    DropLeases,
    FenceResult,
    LeasesLost,
    Objection,
    RenewLeases,
    Welcome,
)
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.core.results import HandshakeEnded, LeaseLost, PeerLost
from pdrelay_connector.core.session.peers import MAX_BACKOFF, PATIENCE, PeerTable
from support.engines import FINGERPRINT, LEASE, changed
from support.recording_link import ConnectingLink

BEAT = LEASE / 6
P = EngineId("p0")


class Harness(ConnectingLink):
    """A borrower whose link goes nowhere: the test says what happens on it."""

    def __init__(self, **choices):
        super().__init__()
        self.counters = Counters()
        self.peers = PeerTable(self, FINGERPRINT, self.counters, retry_after=1.0)
        self.turned_at = float("inf")
        self.lease_renewer = LeaseRenewer(
            self,
            self.peers,
            self.counters,
            heartbeat_interval=BEAT,
            loop_timeout=100.0,
            last_turn=lambda: self.turned_at,
            **choices,
        )

    def start_renewing(self, name, engine=P, now=0.0, port=5600, remote=None):
        offer = PullParams(engine, RequestId(remote or f"p-{name}"), "h", port, ((BlockId(0),),), 4)
        self.lease_renewer.start_renewing(RequestId(f"d-{name}"), offer, now=now)

    def release(self, name, engine=P):
        self.lease_renewer.release(RequestId(f"d-{name}"), engine)

    def welcome(self, engine=P, now=0.0, lease=LEASE):
        self.lease_renewer.on(
            PeerConnected(self.peers.get(engine).conn, Welcome(PROTOCOL, engine, FINGERPRINT, (), lease)), now=now
        )

    def hear(self, message, engine=P):
        self.lease_renewer.on(MessageReceived(self.peers.get(engine).conn, message), now=0.0)

    def take_sent(self):
        self.lease_renewer.advance(now=0.0)  # the end of a turn
        sent = self.sent
        self.sent = []
        return sent


@pytest.fixture
def harness():
    return Harness()


@pytest.fixture
def met(harness):
    """One request is wanted of an engine that has been met."""
    harness.start_renewing("a")
    harness.welcome()
    harness.take_sent()
    return harness


def test_a_lease_is_claimed_as_soon_as_its_engine_is_met(harness):
    """Not a heartbeat later: the lease may be short."""
    harness.start_renewing("a")
    assert harness.sent == []
    harness.welcome()

    assert harness.sent == [(1, RenewLeases(("p-a",)))]


def test_leases_are_renewed_six_times_as_often_as_they_end(met):
    """Counted from the arrival of the first request."""
    beats = []
    now = 0.0
    while now < LEASE:
        due = met.lease_renewer.advance(now=now)
        beats += [now] if met.take_sent() else []
        now = due

    assert beats == [pytest.approx(BEAT * number) for number in range(1, 6)]


@pytest.mark.parametrize(("lease", "beat"), [(6.0, 1.0), (10 * LEASE, BEAT)], ids=["shorter", "longer"])
def test_leases_of_another_length_are_renewed_as_often_as_the_shorter_one_needs(harness, lease, beat):
    """P adds two thirds of its own duration with each renewal: D beat too late for a lease below a quarter of its."""
    harness.start_renewing("a")
    harness.start_renewing("b", engine=EngineId("p1"))
    harness.welcome(lease=lease)
    harness.welcome(EngineId("p1"))
    harness.take_sent()
    beats = []
    now = 0.0
    while now < LEASE - 0.1:
        due = harness.lease_renewer.advance(now=now)
        sent = harness.sent
        harness.sent = []
        beats += [now for conn, _ in sent if conn == 1]
        now = due

    assert beats == pytest.approx([beat * number for number in range(1, len(beats) + 1)])
    assert len(beats) == round((LEASE - 0.1) // beat)


def test_very_many_requests_are_renewed_in_pieces(harness):
    """One frame has a limit."""
    for number in range(MAX_IDS + 1):
        harness.start_renewing(f"{number}")
    harness.welcome()

    assert [len(message.requests) for _, message in harness.sent] == [MAX_IDS, 1]


def test_very_many_requests_are_given_back_in_pieces(harness):
    """A surge that is aborted while the engines still meet must not break the connection they meet on."""
    harness.start_renewing("stays")
    for number in range(MAX_IDS + 1):
        harness.start_renewing(f"{number}")
        harness.release(f"{number}")
    harness.welcome()

    drops = [message.requests for _, message in harness.sent if isinstance(message, DropLeases)]
    assert [len(requests) for requests in drops] == [MAX_IDS, 1]


def test_what_another_request_still_wants_is_not_given_back(met):
    """Of two answers to one prompt, one is aborted: the other must not lose its blocks."""
    met.start_renewing("b", remote="p-a")
    met.take_sent()
    met.release("b")
    assert met.take_sent() == []
    met.release("a")

    assert met.take_sent() == [(1, DropLeases(("p-a",)))]


def test_a_finished_read_is_renewed_no_more_and_not_dropped(met):
    """The worker has told P."""
    met.lease_renewer.stop_renewing(RequestId("d-a"), P)
    met.lease_renewer.advance(now=BEAT)

    assert met.sent == []
    assert len(met.lease_renewer) == 0


@pytest.mark.parametrize("is_first", [True, False], ids=["given back", "refused"])
def test_what_is_given_back_to_an_engine_that_refuses_is_forgotten(harness, is_first):
    """Nobody can be told; its lease ends by itself, and our tables with it, whichever came first."""
    harness.start_renewing("a")
    if is_first:
        harness.release("a")
    harness.lease_renewer.on(ConnectFailed(1, "no route"), now=0.0)
    if not is_first:
        harness.release("a")

    assert harness.sent == []
    assert harness.lease_renewer.advance(now=1e6) is None
    assert harness.lease_renewer._leases_by_engine == {}
    assert len(harness.peers) == 0


def test_a_lost_lease_is_reported_and_renewed_no_more(met):
    """To every request that wanted it: those that have not begun to read compute their own prompts."""
    met.start_renewing("b", remote="p-a")
    met.hear(LeasesLost(("p-a", "p-x")))

    assert met.lease_renewer.take_lost() == [LeaseLost("d-a"), LeaseLost("d-b")]
    assert met.lease_renewer.take_lost() == []
    assert met.counters.take_report().counters["leases_lost"] == 2
    assert (len(met.lease_renewer), met.lease_renewer._leases_by_engine, met.closed) == (0, {}, [])


def test_an_engine_cannot_say_that_anothers_leases_lapsed(met):
    """Names are the lending engine's own."""
    met.start_renewing("b", EngineId("p1"), port=5601, remote="p-a")
    met.welcome(EngineId("p1"))
    met.hear(LeasesLost(("p-a",)), EngineId("p1"))

    assert met.lease_renewer.take_lost() == [LeaseLost("d-b")]


def test_an_engine_whose_loop_hangs_does_not_say_that_it_reads(met):
    """As it does not renew: nothing here looks at the end of the load."""
    met.lease_renewer.read_started(RequestId("d-a"), P)
    met.take_sent()
    met.turned_at = 0.0
    met.lease_renewer.advance(now=200.0)

    assert met.sent == []


def test_the_drops_of_one_turn_are_one_message(met):
    """A surge of aborts costs P a message for a thousand of them, not for each."""
    for number in range(50):
        met.start_renewing(f"{number}")
    met.take_sent()
    for number in range(50):
        met.release(f"{number}")

    assert met.take_sent() == [(1, DropLeases(tuple(f"p-{number}" for number in range(50))))]


# ---- an engine whose loop hangs


def test_a_turn_that_wants_nothing_more_ends_the_withholding(met):
    """Otherwise the engine would say for ever that it hangs."""
    met.turned_at = 0.0
    met.lease_renewer.advance(now=200.0)
    met.release("a")
    met.lease_renewer.advance(now=201.0)

    assert not met.lease_renewer.is_withholding


def test_an_engine_that_breaks_the_protocol_is_left(met):
    """And met anew at the next heartbeat."""
    met.hear(FenceResult(RequestId("x"), held=True))

    assert met.closed == [1]
    assert len(met.peers) == 0
    assert len(met.lease_renewer) == 1


def test_an_unused_engine_that_refused_is_forgotten(harness):
    """Engines come and go for ever."""
    harness.start_renewing("a")
    harness.lease_renewer.on(ConnectFailed(1, "no route"), now=0.0)
    harness.lease_renewer.stop_renewing(RequestId("d-a"), P)
    harness.lease_renewer.advance(now=MAX_BACKOFF + 2)

    assert len(harness.peers) == 0


def test_a_handshake_is_reported_once_to_who_asked(harness):
    """When it ends; at once if it has ended; not at all without a question."""
    harness.start_renewing("a")
    harness.lease_renewer.report_handshake(P, now=0.0)
    assert harness.lease_renewer.take_handshakes() == []
    harness.welcome()
    assert harness.lease_renewer.take_handshakes() == [HandshakeEnded(P)]
    harness.start_renewing("b")
    assert harness.lease_renewer.take_handshakes() == []
    harness.lease_renewer.report_handshake(P, now=0.0)

    assert harness.lease_renewer.take_handshakes() == [HandshakeEnded(P)]


def test_requests_wait_a_little_for_an_engine_that_did_not_answer_before(harness):
    """Its handshake may hang for seconds, and each new request would wait as long."""
    harness.start_renewing("a")
    harness.lease_renewer.on(ConnectFailed(harness.peers.get(P).conn, "timed out"), now=5.0)
    harness.start_renewing("b", now=5.2)  # an offer: it is tried again at once
    harness.lease_renewer.report_handshake(P, now=5.2)
    assert harness.lease_renewer.take_handshakes() == []
    assert harness.lease_renewer.advance(now=5.3) == 5.2 + PATIENCE
    harness.lease_renewer.advance(now=5.2 + PATIENCE)
    too_late = HandshakeEnded(P, failure="it does not answer, and did not before", is_final=False)
    assert harness.lease_renewer.take_handshakes() == [too_late]
    harness.lease_renewer.report_handshake(P, now=6.0)
    assert harness.lease_renewer.take_handshakes() == [too_late]
    harness.welcome(now=6.1)
    harness.lease_renewer.report_handshake(P, now=6.1)

    assert harness.lease_renewer.take_handshakes() == [HandshakeEnded(P)]


def test_an_engine_whose_connection_ended_is_met_anew(met):
    """Under its id another process may answer next, with other weights; or it was refused, and has the right ones."""
    met.lease_renewer.on(ConnectionLost(met.peers.get(P).conn, "closed"), now=1.0)

    assert met.lease_renewer.take_lost_peers() == [PeerLost(P)]
    assert met.lease_renewer.take_lost_peers() == []


def test_a_handshake_that_fails_says_whether_it_can_ever_succeed(harness):
    """A load from an engine that differs must not begin; one that was not reached may be later."""
    harness.start_renewing("a")
    harness.lease_renewer.report_handshake(P, now=0.0)
    harness.lease_renewer.on(ConnectFailed(harness.peers.get(P).conn, "no route"), now=0.0)
    other = EngineId("p1")
    harness.start_renewing("b", engine=other)
    harness.lease_renewer.report_handshake(other, now=0.0)
    differs = Welcome(PROTOCOL, other, changed(FINGERPRINT, vllm="0.31.0"), ())
    harness.lease_renewer.on(PeerConnected(harness.peers.get(other).conn, differs), now=0.0)

    gone = EngineId("p2")
    harness.start_renewing("c", engine=gone)
    harness.lease_renewer.report_handshake(gone, now=0.0)
    another = Welcome(PROTOCOL, EngineId("p3"), FINGERPRINT, ())
    harness.lease_renewer.on(PeerConnected(harness.peers.get(gone).conn, another), now=0.0)

    objection = "its vllm is '0.31.0', ours is '0.32.0'; they must be equal"
    address = harness.peers.get(gone).address
    absence = f"engine p3 answers at {address} now, the request was prefilled by p2"
    assert harness.lease_renewer.take_handshakes() == [
        HandshakeEnded(P, failure="no route", is_final=False, cause="handshake", is_absent=True),
        HandshakeEnded(other, objection, cause="version"),
        HandshakeEnded(gone, absence, cause="refused", is_absent=True),
    ]


def test_an_engine_that_refuses_us_is_asked_again_later(harness):
    """Another protocol, or another secret until both sides have changed theirs: its KV is not loaded now."""
    harness.start_renewing("a")
    harness.lease_renewer.report_handshake(P, now=0.0)
    harness.lease_renewer.on(
        ConnectFailed(harness.peers.get(P).conn, "it refused: no proof", is_incompatible=True, cause="secret"), now=0.0
    )

    refused = HandshakeEnded(P, "it refused: no proof", is_final=False, cause="secret")
    assert harness.lease_renewer.take_handshakes() == [refused]


def test_leases_of_an_engine_that_differs_are_given_back_at_once(harness):
    """Now and later: P would keep the blocks to the lease's end. They are not renewed meanwhile."""
    harness.start_renewing("a")
    conn = harness.peers.get(P).conn
    differs = Welcome(PROTOCOL, P, changed(FINGERPRINT, vllm="0.31.0"), ())
    harness.lease_renewer.on(PeerConnected(conn, differs), now=0.0)
    harness.lease_renewer.release(RequestId("d-a"), P)
    harness.lease_renewer.advance(now=BEAT)
    harness.start_renewing("b")
    harness.lease_renewer.release(RequestId("d-b"), P)
    harness.lease_renewer.advance(now=2 * BEAT)

    objection = Objection("its vllm is '0.31.0', ours is '0.32.0'; they must be equal")
    assert harness.sent == [(conn, objection), (conn, DropLeases(("p-a",))), (conn, DropLeases(("p-b",)))]


def test_a_prefill_engine_that_can_do_either_hears_what_is_read():
    """Of what is pushed it may not have heard yet, so it cannot tell a lease that is lost."""
    harness = Harness(tells_pulled=True)
    harness.start_renewing("a")
    pushed = PushParams(P, "h", 5600, "t", RequestId("t"))
    harness.lease_renewer.start_renewing(RequestId("d-b"), pushed, now=0.0)
    harness.welcome()
    assert harness.sent == [(1, RenewLeases(("t",))), (1, RenewLeases(("p-a",), pulled=True))]
    harness.take_sent()

    harness.release("a")
    harness.release("b")
    harness.lease_renewer.advance(now=0.0)
    assert harness.sent == [(1, DropLeases(("t",))), (1, DropLeases(("p-a",), pulled=True))]
