"""The in-memory fabric itself; that its faults do something, the mutants of ``test_pull_pair.py`` and the like show."""

import numpy as np
import pytest

from pdrelay_connector.core.ids import Address, EngineId, RequestId
from pdrelay_connector.core.messages import PROTOCOL, RenewLeases, Welcome
from pdrelay_connector.core.ports import ConnectionLost, MessageReceived, PeerConnected
from pdrelay_connector.errors import TransferError
from pdrelay_connector.io.in_memory import BLOCK_BYTES, InMemoryLink, InMemoryNetwork, InMemoryTransferAgent
from support.engines import FINGERPRINT, rank_info

ADDRESS = Address("10.0.0.1", 5600)
WELCOME = Welcome(PROTOCOL, EngineId("p"), FINGERPRINT, (rank_info("p"),))


class Pair:
    """Two links, one of which listens."""

    def __init__(self):
        self.network = InMemoryNetwork()
        self.network.memories = {"p": [b"0", b"1"], "d": [b"", b""]}
        self.p, self.d = InMemoryLink(self.network, "p"), InMemoryLink(self.network, "d")
        self.network.listen(ADDRESS, self.p, WELCOME)

    def connect(self):
        conn = self.d.connect(ADDRESS, EngineId("p"))
        self.network.deliver()
        assert list(self.d.poll()) == [PeerConnected(conn, WELCOME, is_elsewhere=True)]
        return conn

    def say(self, conn, *names):
        for name in names:
            self.d.send(conn, RenewLeases((RequestId(name),)))

    def heard(self):
        self.network.deliver()
        events = list(self.p.poll())
        return [event.message.requests[0] if isinstance(event, MessageReceived) else type(event) for event in events]


@pytest.fixture
def pair():
    return Pair()


def test_single_messages_can_be_lost_repeated_and_overtaken(pair):
    """Each by its place among those in flight."""
    conn = pair.connect()
    pair.say(conn, "a", "b", "c")
    assert pair.network.in_flight() == 3
    pair.network.drop(1)
    pair.network.repeat(1)
    pair.network.delay(0)

    assert pair.heard() == ["c", "c", "a"]


def test_what_was_sent_before_a_hang_up_arrives(pair):
    """As on a real connection, and then the end."""
    conn = pair.connect()
    pair.say(conn, "a")
    pair.d.close(conn)
    pair.say(conn, "b")

    assert pair.heard() == ["a", ConnectionLost]
    assert pair.heard() == []


def test_nothing_is_heard_of_a_connection_one_has_closed(pair):
    """Not even what had arrived."""
    conn = pair.connect()
    pair.say(conn, "a", "b")
    pair.network.deliver()
    heard = []
    for event in pair.p.poll():
        heard.append(event.message.requests[0])
        pair.p.close(event.conn)
    pair.say(conn, "c")

    assert heard == ["a"]
    assert pair.heard() == []


def test_a_call_of_a_cut_engine_waits_until_it_is_mended(pair):
    """It hears nothing at all, not even a failure."""
    pair.network.cut(pair.d, is_cut=True)
    conn = pair.d.connect(ADDRESS, EngineId("p"))
    pair.network.deliver()
    assert list(pair.d.poll()) == []
    pair.network.cut(pair.d, is_cut=False)
    pair.network.deliver()

    assert list(pair.d.poll()) == [PeerConnected(conn, WELCOME, is_elsewhere=True)]


def test_inside_an_engine_there_is_no_network_that_could_fail(pair):
    """A worker and its own scheduler share a machine."""
    worker = InMemoryLink(pair.network, "p/0", engine=pair.p.engine)
    pair.network.cut(pair.p, is_cut=True)
    conn = worker.connect(ADDRESS, EngineId("p"))
    pair.network.deliver()
    worker.send(conn, RenewLeases((RequestId("a"),)))
    pair.network.lose()
    pair.network.time_out()

    assert pair.network.in_flight() == 0
    assert list(worker.poll()) == [PeerConnected(conn, WELCOME)]
    assert pair.heard() == ["a"]


def test_a_run_of_several_pieces_moves_all_of_them(pair):
    """What is contiguous on both sides is one descriptor."""
    mover = InMemoryTransferAgent(pair.network, "d")
    mover.read(mover.attach(rank_info("p")), np.array([[0, 0, 2 * BLOCK_BYTES]]))
    (ended,) = mover.poll()

    assert (ended.bytes, ended.descriptors) == (2 * BLOCK_BYTES, 1)
    assert pair.network.memories["d"] == [b"0", b"1"]


@pytest.mark.parametrize("run", [[8, 0, BLOCK_BYTES], [0, 8, BLOCK_BYTES], [0, 0, 8]], ids=repr)
def test_runs_that_cut_a_piece_are_refused(pair, run):
    """A test that moves half a piece would prove nothing."""
    mover = InMemoryTransferAgent(pair.network, "d")
    mover.read(mover.attach(rank_info("p")), np.array([run]))

    with pytest.raises(TransferError, match="pieces of 64 bytes"):
        mover.poll()


def test_only_memory_that_is_there_can_be_attached(pair):
    """As NIXL refuses metadata it cannot use."""
    with pytest.raises(TransferError):
        InMemoryTransferAgent(pair.network, "d").attach(rank_info("nobody"))
