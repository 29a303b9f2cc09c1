"""Who is met, when again, and what an operator reads about those who were not."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, EngineId
from pdrelay_connector.core.messages import PROTOCOL, Fingerprint, Welcome
from pdrelay_connector.core.ports import ConnectFailed, ConnectionLost, PeerConnected
from pdrelay_connector.core.session.peers import (
    MAX_BACKOFF,
    MAX_SILENT,
    PATIENCE,
    PeerState,
    PeerTable,
    mismatch,
)
from support.engines import FINGERPRINT, changed, rank_info
from support.in_memory import InMemoryLink, InMemoryNetwork

P = EngineId("p0")
ADDRESS = Address("10.0.0.1", 5600)
WELCOME = Welcome(PROTOCOL, P, FINGERPRINT, (rank_info("p0"),))


class Book:
    """A peer book on a network that carries nothing: each test tells it what happened."""

    def __init__(self):
        self.network, self.counters = InMemoryNetwork(), Counters()
        self.book = PeerTable(InMemoryLink(self.network, "d"), FINGERPRINT, self.counters, retry_after=1.0)

    def ensure_connected(self, now=0.0, engine=P, address=ADDRESS):
        return self.book.ensure_connected(engine, address, now=now)

    def calls(self):
        """Addresses that we have started to connect to since the last call."""
        calls = self.network._calls
        self.network._calls = []
        return [address for _, _, address in calls]

    def fail(self, peer, now=0.0):
        return self.book.on(ConnectFailed(peer.conn, "no route"), now=now)

    def met(self, now=0.0, welcome=WELCOME):
        peer = self.ensure_connected(now)
        self.book.on(PeerConnected(peer.conn, welcome), now=now)
        return peer


@pytest.fixture
def book():
    return Book()


def test_the_pause_doubles_up_to_a_bound(book):
    """A dead engine costs ever less, a slow one is found again within half a minute."""
    pauses = []
    now = 0.0
    peer = book.ensure_connected()
    for _ in range(40):
        book.fail(peer, now=now)
        pauses.append(peer.retry_at - now)
        now = peer.retry_at
        book.ensure_connected(now)

    assert pauses[:6] == [1, 2, 4, 8, 16, 30]
    assert set(pauses[6:]) == {MAX_BACKOFF}


def test_a_peer_with_a_new_address_is_tried_there_at_once(book):
    """One offer with a wrong address must not shut an engine out for those with the right one."""
    elsewhere = Address("10.0.0.2", 5600)
    book.fail(book.ensure_connected(address=elsewhere))
    book.calls()
    book.ensure_connected(0.1)

    assert book.calls() == [ADDRESS]


def test_an_offer_ends_the_pause_of_a_peer_that_was_not_reached(book):
    """It lives: it has just computed a prompt. Requests wait for it a little while, for it may still hang."""
    peer = book.ensure_connected()
    assert peer.patience_ends == float("inf")
    book.fail(peer)
    book.calls()
    book.ensure_connected(0.1)
    assert book.calls() == []
    book.book.ensure_connected(P, ADDRESS, now=0.2, is_offer=True)
    assert book.calls() == [ADDRESS]
    assert peer.patience_ends == 0.2 + PATIENCE
    book.book.ensure_connected(P, ADDRESS, now=0.3, is_offer=True)
    assert book.calls() == []
    book.book.on(PeerConnected(peer.conn, WELCOME), now=0.4)

    assert (peer.is_doubted, peer.patience_ends) == (False, float("inf"))


def test_an_offer_does_not_end_the_pause_of_a_peer_that_refuses_us(book):
    """That it lives was known: with another secret each request would cost both a handshake."""
    peer = book.ensure_connected()
    book.book.on(ConnectFailed(peer.conn, "no proof", is_incompatible=True), now=0.0)
    book.calls()
    book.book.ensure_connected(P, ADDRESS, now=0.1, is_offer=True)

    assert (peer.state, book.calls()) == (PeerState.REFUSED, [])


@pytest.mark.parametrize("silent", [True, False])
def test_a_peer_that_went_silent_is_doubted_when_it_is_met_again(book, silent):
    """One that closed its connection has ended, or starts again."""
    book.book.on(ConnectionLost(book.met().conn, "gone", silent=silent), now=1.0)

    assert book.ensure_connected(2.0).is_doubted is silent


def test_few_silent_peers_are_remembered(book):
    """Engines come and go for ever."""
    for number in range(MAX_SILENT + 5):
        engine = EngineId(f"p{number}")
        peer = book.ensure_connected(engine=engine)
        book.book.on(PeerConnected(peer.conn, changed(WELCOME, engine=engine)), now=0.0)
        book.book.disconnect(peer, "it does not answer")

    assert len(book.book._silent) == MAX_SILENT


def test_another_protocol_is_named_with_both_numbers(book):
    """A rolling update must tell which side is old."""
    peer = book.met(welcome=changed(WELCOME, protocol=PROTOCOL + 1))

    assert peer.reason == f"it speaks protocol {PROTOCOL + 1}, we speak {PROTOCOL}"


@pytest.mark.parametrize(
    "welcome",
    [
        changed(WELCOME, engine=EngineId("p1\nWARNING")),
        changed(WELCOME, fingerprint=changed(FINGERPRINT, vllm="\nWARNING")),
    ],
    ids=["id", "fingerprint"],
)
def test_an_engine_cannot_forge_a_line_of_our_log_by_its_greeting(book, welcome):
    """The log says why nothing is loaded from it."""
    assert book.met(welcome=welcome).reason.isprintable()


def test_an_engine_that_differs_stays_connected_and_is_not_met_again(book):
    """Its leases are given back over that connection; if it is lost, a request may meet it again."""
    peer = book.met(welcome=changed(WELCOME, fingerprint=changed(FINGERPRINT, vllm="0.31.0")))
    book.calls()
    assert book.ensure_connected(now=60.0) is peer
    assert (peer.state, peer.is_refused, book.calls()) == (PeerState.INCOMPATIBLE, True, [])
    book.book.on(ConnectionLost(peer.conn, "connection reset"), now=60.0)

    assert peer.state is PeerState.GONE
    assert book.met(now=60.0).state is PeerState.CONNECTED


@pytest.mark.parametrize(
    "welcome", [changed(WELCOME, protocol=PROTOCOL + 1), changed(WELCOME, engine=EngineId("p1"))], ids=str
)
def test_another_engine_is_left_and_asked_again_later(book, welcome):
    """No lease of ours is there."""
    peer = book.met(welcome=welcome)
    assert (peer.state, peer.is_incompatible, peer.is_final) == (PeerState.REFUSED, True, True)
    assert book.book.find(peer.conn) is None
    book.ensure_connected(now=2.0)
    book.fail(peer, now=2.0)

    assert (peer.is_incompatible, peer.is_final, peer.reason) == (False, False, "no route")


def test_a_peer_of_another_shape_is_refused_where_its_kv_would_be_read():
    """Every rank of it that does not fit one of ours; a scheduler knows before blocks are allocated."""
    narrow, wide = rank_info("d"), rank_info("p0", width=2)
    book = Book()
    book.book = PeerTable(InMemoryLink(book.network, "d"), FINGERPRINT, Counters(), retry_after=1.0, ranks=(narrow,))
    peer = book.met(welcome=changed(WELCOME, ranks=(rank_info("p0"), wide)))

    assert peer.state is PeerState.INCOMPATIBLE
    assert "they must be equal" in peer.reason


@pytest.mark.parametrize("name", Fingerprint.__struct_fields__)
def test_a_mismatch_names_both_values(name):
    """An operator must see what to change on which engine."""
    our = getattr(FINGERPRINT, name)
    their = our + 1 if isinstance(our, int) else f"{our}-x"
    sentence = mismatch(FINGERPRINT, changed(FINGERPRINT, **{name: their}))

    its, ours = (
        (f"its {name} are", "ours are") if name == "weights" else (f"its {name.replace('_', ' ')} is", "ours is")
    )
    hint = "it serves another model, or another revision of it: " if name in ("config", "tokenizer", "weights") else ""
    assert sentence == f"{hint}{its} {their!r}, {ours} {our!r}; they must be equal"
    assert mismatch(FINGERPRINT, FINGERPRINT) is None


@pytest.mark.parametrize("name", ["draft_model", "config", "tokenizer", "weights"])
def test_a_worker_leaves_what_the_model_is_to_its_scheduler(name):
    """A worker on another machine may lack the files. It is asked to read only what its scheduler has compared."""
    worker = changed(FINGERPRINT, **{name: ""})

    assert mismatch(worker, FINGERPRINT) is None
    assert mismatch(FINGERPRINT, worker) is not None


def test_refused_peers_are_forgotten(book):
    """Engines come and go for ever, with a new id each: the table must not grow for ever."""
    for number in range(100):
        book.fail(book.ensure_connected(engine=EngineId(f"p{number}")))
    wanted = EngineId("p7")
    book.book.forget_refused([wanted], now=MAX_BACKOFF)
    assert len(book.book) == 100
    book.book.forget_refused([wanted], now=MAX_BACKOFF + 1.0)
    assert len(book.book) == 1
    book.book.forget_refused([], now=MAX_BACKOFF + 1.0)

    assert len(book.book) == 0
