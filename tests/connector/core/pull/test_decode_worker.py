"""Loading: the rules that the stories of ``pull/test_pull_pair.py`` do not show."""

import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import Address, BlockId, ConnId, EngineId, RequestId
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.messages import (
    DropLeases,
    FenceResult,
    LeasesLost,
    PartRefused,
    PartStaged,
    ReadDone,
    StagePart,
)
from pdrelay_connector.core.ports import MessageReceived
from pdrelay_connector.core.pull.decode_worker import POLL_INTERVAL, STAGING_TIMEOUT_FACTOR, PullReader
from pdrelay_connector.core.pull.load import LoadOrder, LoadState
from pdrelay_connector.core.results import BlocksReleased, LoadResult
from pdrelay_connector.core.session.peers import PATIENCE, PeerTable
from pdrelay_connector.core.staging.slots import HostBuffer, Slots
from pdrelay_connector.errors import IllegalTransition
from support.engines import BLOCK_SIZE, BLOCKS, FINGERPRINT, TIMEOUT, World, changed, rank_info, right
from support.in_memory import InMemoryLink, InMemoryTransferAgent
from support.recording_agent import RecordingCopier

RIGHT = [b"p-a/0", b"p-a/1", b"p-a/2"]


@pytest.fixture
def world():
    return World()


def offered(world, request="a", engine=None):
    return (engine or world.p).prefill(f"p-{request}", 3, now=world.now)


def state(world, request="a"):
    return world.d.reader._loads[RequestId(f"d-{request}")].state


def counters(world):
    return world.d.worker_tally.take_report().counters


def test_a_request_is_loaded_once(world):
    """Two reads into the same blocks would overtake each other."""
    offer = offered(world)
    world.load(offer)

    with pytest.raises(IllegalTransition, match="twice"):
        world.load(offer)


def test_many_loads_meet_a_peer_once(world):
    """A surge at a new prefill engine is one handshake, and all of them are read after it."""
    offers = {name: world.p.prefill(f"p-{name}", 1, now=0.0) for name in "abcd"}
    for name, offer in offers.items():
        world.load(offer, name)
    world.run()

    assert all(world.d.result(f"d-{name}").failure == "" for name in offers)
    assert counters(world)["handshakes"] == 1


def test_the_thread_looks_at_nixl_often_only_while_something_is_read(world):
    """An idle engine sleeps; a waiting one wakes for its deadline."""
    reader = world.d.reader
    assert reader.advance(now=0.0) is None
    world.d.mover.stuck = True
    world.load(offered(world))
    assert reader.advance(now=0.0) == TIMEOUT
    world.run()

    assert reader.advance(now=0.0) == POLL_INTERVAL


def test_one_deadline_is_for_the_whole_load(world):
    """A read that has ended late, after a freeze, leaves no time for asking: who waits so long gets a local prefill."""
    world.d.mover.stuck = True
    world.load(offered(world))
    world.run(seconds=TIMEOUT - 1)
    world.d.mover.stuck = False
    world.network.cut(world.p.link, is_cut=True)
    world.run(seconds=1)

    assert "not loaded within 20 s" in world.d.result("d-a").failure


def test_loads_of_a_hung_peer_whose_time_is_up_together_end_once_each(world):
    """The first one takes the second one along with the peer; ending it again would end the thread."""
    first = offered(world)
    second = world.p.prefill("p-b", 1, now=0.0)
    world.load(first)
    world.load(second, "b")
    world.round()
    world.p.frozen = True
    world.round()
    assert state(world) is state(world, "b") is LoadState.CONFIRMING
    world.run(seconds=TIMEOUT)

    assert "not loaded within" in world.d.result("d-a").failure
    assert "does not answer" in world.d.result("d-b").failure


def test_loads_do_not_each_wait_for_a_peer_that_hangs(world):
    """Four of eighteen requests waited for the 5 s of a handshake each."""
    offers = {name: world.p.prefill(f"p-{name}", 1, now=0.0) for name in "abcd"}
    reader = world.d.reader
    world.load(offers["a"])
    world.run()
    reader.take_results()
    world.d.worker_peers.disconnect(world.d.worker_peers.get(EngineId("p0")), "it does not answer")
    world.load(offers["b"], "b")
    assert (reader.advance(now=PATIENCE - 0.01), reader.take_results()) == (PATIENCE, [])
    reader.advance(now=PATIENCE)
    assert "does not answer, and did not before" in reader.take_results()[0].failure
    world.now = 3.0
    world.load(offers["c"], "c")
    assert "does not answer, and did not before" in reader.take_results()[0].failure
    world.run()  # the handshake ends: it hangs no longer
    into = world.load(offers["d"], "d")
    world.run()

    assert world.d.bytes_of(into) == [b"p-d/0"]
    assert counters(world)["loads_failed_handshake"] == 2


def test_a_rank_that_keeps_none_of_the_tokens_reads_nothing_and_says_that_it_is_done(world):
    """Where ranks divide a context, one of them has a single token: the others waited, and gave up all loads from P."""
    network = world.network
    network.memories["d0/1"] = [b"fresh"] * (BLOCKS + 1)
    link = InMemoryLink(network, "d0/1", engine="d0")
    whole = rank_info("d0/1", rank=1, ranks=2, all_heads=1)
    own = changed(whole, regions=(changed(whole.regions[0], shards=2),))
    peers = PeerTable(link, FINGERPRINT, Counters(), retry_after=1.0)
    reader = PullReader(link, InMemoryTransferAgent(network, "d0/1"), peers, Counters(), own, timeout=TIMEOUT)
    offer = offered(world)
    token = TokenRange(0, 0, 1, offer.remote_block_ids[0], (BlockId(1),))
    reader.load(
        LoadOrder(RequestId("d-a"), offer.remote_request_id, EngineId("p0"), world.p.address, (token,)), now=0.0
    )
    for _ in range(4):
        world.round()
        for event in link.poll():
            reader.on(event, now=0.0)
        reader.advance(now=0.0)

    assert reader.take_results() == [LoadResult(RequestId("d-a"), "")]


def test_an_offer_of_blocks_the_peer_does_not_have_fails_alone(world):
    """A router's mistake costs one load, not the connection and not the thread."""
    offer = offered(world)
    world.load(changed(offer, remote_block_ids=((0, 500, 2),)))
    into = world.load(world.p.prefill("p-b", 3, now=0.0), "b")
    world.run()

    assert "block 500" in world.d.result("d-a").failure
    assert world.d.result("d-b").failure == ""
    assert world.d.bytes_of(into) == [b"p-b/0", b"p-b/1", b"p-b/2"]
    assert [released.reason.name for released in world.p.freed] == ["DROPPED", "DONE"]


def test_a_read_that_nixl_fails_gives_the_blocks_back(world):
    """P need not wait for the end of the lease."""
    world.d.mover.stuck = True
    world.load(offered(world))
    world.run()
    world.d.mover.stuck = False
    world.d.mover.broken = world.d.builds_none = True
    world.run(seconds=1)

    assert "NIXL: the backend is broken" in world.d.result("d-a").failure
    assert [released.reason.name for released in world.p.freed] == ["DROPPED"]


def test_a_verdict_of_another_peer_does_not_count(world):
    """Whoever guesses a request id must not be able to turn unfenced bytes into an answer."""
    other = world.start("p1", 5601)
    world.load(offered(world, "b", other), "b")
    world.run()
    world.load(offered(world))
    world.round()
    world.round()
    assert state(world) is LoadState.CONFIRMING
    stranger = world.d.worker_peers.get(EngineId("p1")).conn
    for conn in (stranger, ConnId(10**6)):
        world.d.reader.on(MessageReceived(conn, FenceResult(RequestId("d-a"), held=True)), now=0.0)

    assert state(world) is LoadState.CONFIRMING


def test_a_peer_that_breaks_the_protocol_is_dropped_with_its_loads(world):
    """What it said about other things cannot be trusted either."""
    world.d.mover.stuck = True
    world.load(offered(world))
    world.run()
    peer = world.d.worker_peers.get(EngineId("p0"))
    world.d.reader.on(MessageReceived(peer.conn, LeasesLost(())), now=0.0)
    world.run()

    assert world.d.result("d-a").failure == "10.0.0.1:5600 is gone: it broke the protocol"
    assert len(world.d.worker_peers) == 0


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [((), "has no ranks"), (("other",), "no memory of other"), (("p0", 32), "has entries of 32 bytes, ours 16")],
)
def test_a_peer_whose_memory_cannot_be_read_is_refused(world, ranks, sentence):
    """Its loads fail with the reason, and the handle of a half-attached peer is not used."""
    link, welcome = world.network._listeners[world.p.address]
    info = [changed(welcome.ranks[0], agent=ranks[0].encode())] if ranks else []
    if len(ranks) > 1:
        info = [changed(info[0], regions=(changed(info[0].regions[0], width=ranks[1]),))]
    world.network.listen(world.p.address, link, changed(welcome, ranks=tuple(info)))
    world.load(offered(world))
    world.run()

    assert sentence in world.d.result("d-a").failure
    assert counters(world) == {"handshakes": 1, "handshakes_failed": 1, "loads_failed_handshake": 1}


def noted(world):
    """Return what the worker of D has noted since the last call: what, when, how many."""
    return [(str(event.step), event.at, event.count) for event in world.d.worker_tally.take_report().events]


@pytest.fixture
def noting(world):
    """Engines whose requests have timelines."""
    world.d.worker_tally.keeps_events = True
    return world


def test_the_timeline_of_a_load_that_hangs_says_how_long_it_hung(noting):
    """Else that time was a wait for a step of this engine."""
    noting.d.mover.stuck = True
    noting.load(offered(noting))
    noting.run()
    noting.run(seconds=TIMEOUT)
    noting.d.mover.stuck = False
    noting.run()
    found = noted(noting)

    assert [step for step, *_ in found] == ["load_begun", "peer_met", "reading", "load_failed"]
    assert found[-1][1] - found[-2][1] == pytest.approx(TIMEOUT, abs=1)


# ---- from an engine that stages: P copies each part into its host memory first


class StagingEngine:
    """One that lends, and stages when the test says so: it hears what a reader asks, and the test answers."""

    def __init__(self, blocks):
        self.world = World()
        self.offer = self.world.lend(blocks=blocks)
        network = self.world.network
        _, welcome = network._listeners[self.world.p.address]
        self._link = InMemoryLink(network, "p0")
        network.listen(
            self.world.p.address, self._link, changed(welcome, ranks=(changed(welcome.ranks[0], staged=True),))
        )
        self.into = self.world.load(self.offer)

    def hear(self):
        """Return what the reader has said since the last call."""
        self.world.run()
        heard = [event for event in self._link.poll() if isinstance(event, MessageReceived)]
        for event in heard:
            self._conn = event.conn
        return [event.message for event in heard]

    def answer(self, message):
        self._link.send(self._conn, message)
        self.world.run()

    def stage(self, blocks):
        """Move blocks into slots, and return these; the blocks are somebody else's from now on."""
        slots = tuple(map(BlockId, range(9, 9 + len(blocks))))
        memory = self.world.p.memories[0]
        for slot, block in zip(slots, blocks, strict=True):
            memory[slot] = memory[block]
            memory[block] = b"another's"
        return slots


def test_parts_that_p_stages_are_read_from_its_slots_one_after_the_other():
    """All that a device that NIXL cannot read keeps is read so."""
    p = StagingEngine(blocks=5)
    (blocks,) = p.offer.remote_block_ids
    for number, part in enumerate((blocks[:3], blocks[3:])):  # a quarter of P's 12 slots at a time
        assert p.hear() == [StagePart("p-a", "d-a", 0, 1, number, (part,))]
        p.answer(PartStaged("d-a", number, (p.stage(part),)))
    assert p.hear() == [ReadDone("p-a", "d-a", 0, 1)]
    p.answer(FenceResult("d-a", held=True))

    assert p.world.d.result("d-a").failure == ""
    assert p.world.d.bytes_of(p.into) == [right("p-a", number, 0) for number in range(5)]


def test_the_timeline_shows_when_p_was_asked_for_each_part():
    """How long P takes to copy it is no part of the read."""
    p = StagingEngine(blocks=5)
    p.world.d.worker_tally.keeps_events = True
    (blocks,) = p.offer.remote_block_ids
    for number, part in enumerate((blocks[:3], blocks[3:])):
        p.hear()
        p.world.now += 0.2
        p.answer(PartStaged("d-a", number, (p.stage(part),)))
    p.hear()
    found = [(step, count, round(at, 1)) for step, at, count in noted(p.world) if step in ("staging", "reading")]

    assert found == [("staging", 3, 0.0), ("reading", 3, 0.2), ("staging", 2, 0.2), ("reading", 2, 0.4)]


def test_the_timeline_of_a_load_that_p_does_not_confirm_ends_with_its_failure():
    """It was read in vain."""
    p = StagingEngine(blocks=2)
    p.world.d.worker_tally.keeps_events = True
    (blocks,) = p.offer.remote_block_ids
    p.hear()
    p.answer(PartStaged("d-a", 0, (p.stage(blocks),)))
    p.hear()
    p.answer(FenceResult("d-a", held=False))

    assert [step for step, *_ in noted(p.world)][-2:] == ["read", "load_failed"]


def test_a_part_that_p_does_not_stage_fails_the_load():
    """With P's reason, and P may free its blocks."""
    p = StagingEngine(blocks=2)
    p.hear()
    p.answer(PartRefused("d-a", 0, "no such block"))

    assert p.hear() == [DropLeases(("p-a",))]
    assert p.world.d.result("d-a").failure == "it was not staged: no such block"
    assert counters(p.world)["loads_failed_staging"] == 1


def test_p_has_more_time_to_stage_a_part_than_to_be_read():
    """It stages for others first. What it says of another part answers nothing."""
    p = StagingEngine(blocks=2)
    p.hear()
    p.answer(PartStaged("d-a", 1, ((BlockId(9), BlockId(10)),)))
    p.answer(PartRefused("d-a", 1, "another part"))
    p.world.run(seconds=STAGING_TIMEOUT_FACTOR * TIMEOUT - 1)
    assert state(p.world) is LoadState.ASKING
    p.world.run(seconds=1)

    assert "not loaded within" in p.world.d.result("d-a").failure


# ---- through host memory


class Harness:
    """A decode worker with host memory for a dozen blocks, three of them for each part, and an engine to read from."""

    def __init__(self, slots=12):
        self.world, self.copier, self.now = World(), RecordingCopier(), 0.0
        network = self.world.network
        network.memories["d-host"] = [b"slot"] * (BLOCKS + 1)
        self.link, self.mover = InMemoryLink(network, "d-host"), InMemoryTransferAgent(network, "d-host")
        self.slots, self.counters = Slots((slots,)), Counters()
        peers = PeerTable(self.link, FINGERPRINT, self.counters, retry_after=1.0)
        own = changed(rank_info("d-host", blocks=slots + 1), staged=True)
        host = HostBuffer(self.slots, self.copier)
        self.reader = PullReader(self.link, self.mover, peers, self.counters, own, timeout=TIMEOUT, staging=host)

    def load(self, request="a", blocks=3):
        offer = self.world.lend(request, blocks)
        remote = offer.remote_block_ids[0]
        whole = TokenRange(0, 0, blocks * BLOCK_SIZE, remote, [block + 20 for block in remote])
        order = LoadOrder(
            RequestId(f"d-{request}"), offer.remote_request_id, EngineId("p0"), self.world.p.address, (whole,)
        )
        self.reader.load(order, now=self.now)

    def turn(self):
        """Deliver what travels, and have a turn; return when the thread would be called again."""
        self.world.now = self.now
        self.world.round()
        for event in self.link.poll():
            self.reader.on(event, now=self.now)
        return self.reader.advance(now=self.now)

    def state(self, request="a"):
        return self.reader._loads[RequestId(f"d-{request}")].state

    def copied(self, *copies, reason=""):
        self.copier.end(*copies, reason=reason)
        return self.turn()


def test_what_was_read_into_host_memory_is_copied_to_where_it_belongs():
    """And only then P is told that it was read."""
    harness = Harness()
    harness.load()
    for _ in range(4):
        harness.turn()
    assert harness.state() is LoadState.COPYING
    assert harness.copier.copies == [([[1, 2, 3]], [[21, 22, 23]])]
    assert harness.world.network.memories["d-host"][1:4] == RIGHT
    assert harness.world.p.freed == []
    harness.copied(0)
    harness.turn()
    harness.turn()

    assert harness.reader.take_results() == [LoadResult(RequestId("d-a"), "")]
    assert harness.slots.granted == len(harness.slots) == 0


def test_the_timeline_shows_how_long_a_load_waited_for_room():
    """Another one has all of the host memory for 200 ms."""
    harness = Harness(slots=1)
    harness.counters.keeps_events = True
    for name in "ab":
        harness.load(name, blocks=1)
    for _ in range(4):
        harness.turn()
    harness.now += 0.2
    harness.copied(0)
    for _ in range(4):
        harness.turn()
    events = [event for event in harness.counters.take_report().events if event.request == "d-b"]

    assert [(str(event.step), round(event.at, 1)) for event in events] == [("load_begun", 0.0), ("reading", 0.2)]


def test_a_copy_that_fails_fails_the_load():
    """Nothing is written into its blocks any more: they are free at once."""
    harness = Harness()
    harness.load()
    for _ in range(4):
        harness.turn()
    harness.copied(0, reason="out of memory")
    (result,) = harness.reader.take_results()

    assert result == LoadResult(RequestId("d-a"), "it was not copied out of host memory: out of memory")
    assert harness.counters.take_report().counters["loads_failed_staging"] == 1
    assert harness.slots.granted == len(harness.slots) == 0


def test_a_copy_that_does_not_end_is_quarantined():
    """It still writes into the request's blocks; the slots are kept as long."""
    harness = Harness()
    harness.load()
    for _ in range(4):
        harness.turn()
    harness.now = TIMEOUT
    harness.turn()
    (result,) = harness.reader.take_results()
    assert (result.quarantined, harness.slots.granted) == (True, 3)
    harness.copied(0)

    assert harness.reader.take_results() == [BlocksReleased(RequestId("d-a"))]
    assert harness.slots.granted == len(harness.slots) == 0


def test_who_waits_for_room_that_a_failed_load_keeps_does_not_wait_for_ever():
    """What it still waits for may never end: a peer that hangs would stop the loads from all others."""
    harness = Harness(1)
    harness.load("a", blocks=1)
    harness.load("b", blocks=1)
    for _ in range(4):
        harness.turn()
    harness.now = TIMEOUT
    harness.turn()
    assert (harness.state("a"), harness.state("b")) == (LoadState.ABORTING, LoadState.QUEUED)
    harness.reader.take_results()
    harness.now += TIMEOUT / 2
    harness.load("c", blocks=1)
    harness.turn()
    harness.now = 2 * TIMEOUT
    harness.turn()

    sentence = f"a failed load has kept its slots of host memory for {TIMEOUT:g} s"
    assert harness.reader.take_results() == [LoadResult(RequestId("d-b"), sentence)]
    assert harness.counters.take_report().counters["loads_failed_staging"] == 1
    harness.copied(0)
    assert harness.state("c") is LoadState.READING


def test_who_waits_for_room_goes_on_in_the_turn_in_which_another_times_out():
    """Nothing else would wake the thread: it would wait for ever."""
    harness = Harness(1)
    harness.world.network.cut(harness.link, is_cut=True)
    harness.load("a")
    harness.load("b")
    harness.turn()
    assert (harness.state("a"), harness.state("b")) == (LoadState.WAITING, LoadState.QUEUED)
    harness.now = TIMEOUT
    due = harness.turn()

    assert [result.request for result in harness.reader.take_results()] == ["d-a"]
    assert (harness.state("b"), due) == (LoadState.WAITING, 2 * TIMEOUT)


def test_who_waits_for_room_goes_on_when_a_refused_peer_costs_another_its_turn():
    """The same: room that is free again before anybody had it."""
    harness = Harness(1)
    harness.load("a", blocks=1)
    for _ in range(4):
        harness.turn()
    harness.world.network._listeners.clear()
    stranger = LoadOrder(
        RequestId("d-x"),
        RequestId("p"),
        EngineId("p9"),
        Address("10.0.0.9", 1),
        (TokenRange(0, 0, BLOCK_SIZE, [1], [2]),),
    )
    harness.reader.load(stranger, now=0.0)
    harness.reader.load(stranger._replace(request=RequestId("d-y")), now=0.0)
    harness.turn()
    harness.copied(0)
    while not (results := harness.reader.take_results()):
        assert harness.state("x") is harness.state("y") is LoadState.QUEUED
        harness.turn()

    assert [result.request for result in results] == ["d-a", "d-x", "d-y"]
    assert all("was not met" in result.failure for result in results[1:])


@pytest.mark.parametrize(("slots", "each"), [(12, 3), (8, 2), (3, 1), (1, 1)])
def test_a_load_that_is_too_large_for_host_memory_comes_in_parts(slots, each):
    """A part is a quarter of the buffer, or a block where that is less."""
    harness = Harness(slots)
    harness.load(blocks=6)
    for number in range(6):
        for _ in range(4):
            harness.turn()
        if len(harness.copier.copies) > number:
            harness.copied(number)
    for _ in range(3):
        harness.turn()

    assert all(group == list(range(1, each + 1)) for (group,), _ in harness.copier.copies)
    assert [blocks for _, (blocks,) in harness.copier.copies] == [
        [21 + first + n for n in range(each)] for first in range(0, 6, each)
    ]
    assert harness.reader.take_results() == [LoadResult(RequestId("d-a"), "")]
    assert harness.slots.granted == len(harness.slots) == 0
