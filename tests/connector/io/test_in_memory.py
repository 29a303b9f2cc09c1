"""The in-memory fabric itself: a fault that does nothing would make every test above it worthless."""

import numpy as np
import pytest

from support.engines import FINGERPRINT, rank_info
from xpyd_connector.core.ids import Address, EngineId, RequestId
from xpyd_connector.core.messages import PROTOCOL, RenewLeases, Welcome
from xpyd_connector.core.ports import ConnectFailed, ConnectionLost, MessageReceived, PeerConnected, XferOutcome
from xpyd_connector.errors import TransferError
from xpyd_connector.io.in_memory import BLOCK_BYTES, InMemoryLink, InMemoryNetwork, InMemoryTransferAgent

ADDRESS = Address("10.0.0.1", 5600)
WELCOME = Welcome(PROTOCOL, EngineId("p"), FINGERPRINT, (rank_info("p"),))
CROSSED = np.array([[BLOCK_BYTES, 0, BLOCK_BYTES], [0, BLOCK_BYTES, BLOCK_BYTES]])  # from address, to address, bytes


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
        assert list(self.d.poll()) == [PeerConnected(conn, WELCOME)]
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


def test_messages_travel_when_the_network_delivers(pair):
    """Not before: a test decides."""
    pair.say(pair.connect(), "a", "b")
    assert list(pair.p.poll()) == []

    assert pair.heard() == ["a", "b"]


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


def test_a_cut_engine_neither_hears_nor_is_heard_until_it_is_mended(pair):
    """And nobody is told."""
    conn = pair.connect()
    pair.network.cut(pair.p, is_cut=True)
    pair.say(conn, "a")
    assert pair.heard() == []
    assert not pair.network.reachable("p")
    other = pair.d.connect(ADDRESS, EngineId("p"))
    pair.network.deliver()
    assert list(pair.d.poll()) == [ConnectFailed(other, f"cannot connect to {ADDRESS}")]
    pair.network.cut(pair.p, is_cut=False)

    assert pair.heard() == ["a"]


def test_a_call_of_a_cut_engine_waits_until_it_is_mended(pair):
    """It hears nothing at all, not even a failure."""
    pair.network.cut(pair.d, is_cut=True)
    conn = pair.d.connect(ADDRESS, EngineId("p"))
    pair.network.deliver()
    assert list(pair.d.poll()) == []
    pair.network.cut(pair.d, is_cut=False)
    pair.network.deliver()

    assert list(pair.d.poll()) == [PeerConnected(conn, WELCOME)]


def test_a_killed_engine_is_gone_with_its_memory(pair):
    """Connections, calls under way, its address and its blocks."""
    pair.connect()
    pair.d.connect(ADDRESS, EngineId("p"))
    pair.network.kill(pair.d)

    assert pair.heard() == [ConnectionLost]
    assert "d" not in pair.network.memories


def test_broken_connections_are_lost_on_both_sides(pair):
    """With everything in flight."""
    pair.say(pair.connect(), "a")
    pair.network.lose()

    assert pair.heard() == [ConnectionLost]
    assert [type(event) for event in pair.d.poll()] == [ConnectionLost]


def test_a_cut_that_is_noticed_ends_in_silence_on_both_sides(pair):
    """As TCP gives up: neither knows whether the other lives. Who is not cut off notices nothing."""
    pair.connect()
    pair.network.time_out()
    assert pair.heard() == []
    pair.network.cut(pair.p, is_cut=True)
    pair.network.time_out()

    assert [event.silent for event in [*pair.p.poll(), *pair.d.poll()]] == [True, True]
    assert pair.heard() == []


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


def test_one_can_look_at_what_is_in_flight(pair):
    """To choose whom a fault hits."""
    pair.say(pair.connect(), "a", "b")

    assert pair.network.peek(1) == RenewLeases((RequestId("b"),))


def test_a_write_copies_blocks(pair):
    """The other way round."""
    pair.network.memories["d"] = [b"x", b"y"]
    mover = InMemoryTransferAgent(pair.network, "d")
    transfer = mover.write(mover.attach(rank_info("p")), CROSSED)
    (ended,) = mover.poll()

    assert (ended.xfer, ended.outcome) == (transfer, XferOutcome.DONE)
    assert pair.network.memories["p"] == [b"y", b"x"]


def read(pair, mover):
    handle = mover.attach(rank_info("p"))
    return handle, mover.read(handle, CROSSED)


def test_a_read_copies_blocks(pair):
    """In the order it was asked for."""
    mover = InMemoryTransferAgent(pair.network, "d")
    _, transfer = read(pair, mover)
    (ended,) = mover.poll()

    assert (ended.xfer, ended.outcome, ended.descriptors) == (transfer, XferOutcome.DONE, 2)
    assert pair.network.memories["d"] == [b"1", b"0"]


def test_a_stuck_read_ends_when_it_is_cancelled(pair):
    """Without having moved anything."""
    mover = InMemoryTransferAgent(pair.network, "d")
    mover.stuck = True
    _, transfer = read(pair, mover)
    assert mover.poll() == []
    mover.cancel(transfer)
    mover.cancel(999)

    assert [ended.outcome for ended in mover.poll()] == [XferOutcome.FAILED]
    assert pair.network.memories["d"] == [b"", b""]


def test_late_bytes_land_when_nixl_stops_clinging(pair):
    """What makes a careless reader hand out wrong text."""
    mover = InMemoryTransferAgent(pair.network, "d")
    mover.stuck = mover.clinging = True
    handle, transfer = read(pair, mover)
    mover.cancel(transfer)
    mover.detach(handle)
    assert mover.poll() == []
    mover.clinging = False

    assert [ended.outcome for ended in mover.poll()] == [XferOutcome.FAILED]
    assert pair.network.memories["d"] == [b"1", b"0"]


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
