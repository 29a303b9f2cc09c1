"""Backends and connections that break under two engines: what is loaded, what is kept, and how often it is tried.

Both engines are the connector's real cores over the in-memory fabric, in virtual time.
"""

import logging

import numpy as np
import pytest

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.lease.lease_table import LeaseEvent
from pdrelay_connector.core.ports import XferOutcome
from pdrelay_connector.core.transfer.backend import MAX_REBUILDS, PERIOD
from pdrelay_connector.io.recovering_agent import RecoveringAgent
from support.engines import TIMEOUT, World, rank_info
from support.in_memory import BLOCK_BYTES, InMemoryNetwork, InMemoryTransferAgent
from support.push_engines import WRITE, PushWorld

RIGHT = [b"p-a/0", b"p-a/1", b"p-a/2"]


@pytest.fixture
def world():
    return World()


def begin(world, request="a", p=None):
    """A request whose prompt P has computed, and which D begins to load."""
    offer = (p or world.p).prefill(f"p-{request}", 3, now=world.now)
    world.start_renewing(offer, request)
    return world.load(offer, request)


def counted(world, *names):
    counters = world.d.worker_tally.take_report().counters
    return [counters.get(name, 0) for name in names]


def reading(world):
    """D has read something over its connection, and now reads what does not move."""
    begin(world, "before")
    world.run()
    world.d.finish("d-before")
    world.d.mover.stuck = True
    into = begin(world)
    world.run()
    return into


def why(world):
    return [released.reason for released in world.p.freed]


def test_a_read_whose_connection_breaks_is_read_over_another(world):
    """NIXL does not connect again by itself: without us every later load from this P would fail."""
    into = reading(world)
    world.d.mover.lose("p0")
    world.d.mover.stuck = False
    world.run(seconds=1)

    assert world.d.bytes_of(into) == RIGHT
    assert why(world) == [LeaseEvent.DONE] * 2
    assert counted(world, "connections_replaced", "transfers_retried", "backends_rebuilt") == [1, 1, 0]


def test_a_load_that_begins_over_a_broken_connection_opens_another(world):
    """And so does each that begins before it is open: one connection is enough for all."""
    begin(world, "before")
    world.run()
    world.d.mover.lose("p0")
    both = [begin(world, name) for name in "ab"]
    world.run(seconds=1)

    assert [world.d.bytes_of(into)[0] for into in both] == [b"p-a/0", b"p-b/0"]
    assert counted(world, "connections_replaced", "backends_rebuilt") == [1, 0]


@pytest.mark.parametrize("when", ["while it reads", "before"])
def test_a_broken_backend_is_replaced_and_the_leases_are_kept(world, when, caplog):
    """What is under way is read again, and so is what P lent before, for which it hears nothing of all this."""
    queued = world.lend("queued")
    world.start_renewing(queued, "queued")
    if when == "before":
        begin(world, "before")
        world.run()
        world.d.mover.broken = True
        into = begin(world)
    else:
        into = reading(world)
        world.d.mover.broken = True
        world.d.mover.stuck = False
    world.run(seconds=1)
    later = world.load(queued, "queued")
    world.run()

    assert world.d.bytes_of(into) == RIGHT
    assert world.d.bytes_of(later)[0] == b"p-queued/0"
    assert why(world) == [LeaseEvent.DONE] * 3
    assert counted(world, "backends_rebuilt", "backends_given_up") == [1, 0]
    assert world.d.recovering.backends == 1
    assert sum("was built again" in record.message for record in caplog.records) == 1


def test_a_peer_whose_own_backend_serves_nobody_does_not_cost_the_others_theirs(world):
    """While D reads from another P, it fails the loads from this one, as ever."""
    other = world.start("p1", 5601)
    world.network.unreachable.add("p0")
    begin(world)
    for number in range(6):
        begin(world, f"o{number}", other)
        world.run(seconds=0.02, step=0.02)
        world.d.finish(f"d-o{number}")
    world.run(seconds=1)

    assert "NIXL" in world.d.result("d-a").failure
    assert all(world.d.result(f"d-o{number}").failure == "" for number in range(6))
    assert counted(world, "backends_rebuilt", "loads_failed_transfer") == [0, 1]


def test_a_peer_that_serves_again_is_read_from_with_the_leases_of_before(world):
    """Whatever D has tried meanwhile: its backends were no use, and are not more than a few."""
    queued = world.lend("queued")
    world.start_renewing(queued, "queued")
    world.network.unreachable.add("p0")
    for number in range(2 * MAX_REBUILDS):
        begin(world, f"o{number}")
        world.run(seconds=1)
    failed = counted(world, "loads_failed_transfer", "backends_rebuilt", "backends_given_up")
    world.network.unreachable.clear()
    into = world.load(queued, "queued")
    world.run(seconds=1)

    assert failed == [2 * MAX_REBUILDS, MAX_REBUILDS, 1]
    assert world.d.bytes_of(into)[0] == b"p-queued/0"
    assert world.d.result("d-queued").failure == ""
    assert len(world.d.closed) == MAX_REBUILDS - 1  # the first is never closed, and the last is in use


def test_after_a_while_another_backend_is_tried(world):
    world.network.unreachable.add("p0")
    for number in range(2 * MAX_REBUILDS):
        begin(world, f"o{number}")
        world.run(seconds=1)
    world.run(seconds=PERIOD, step=10.0)
    world.d.mover.broken = True
    world.network.unreachable.clear()
    into = begin(world)
    world.run(seconds=1)

    assert world.d.bytes_of(into) == RIGHT


def test_a_backend_that_cannot_be_built_fails_the_load(world, caplog):
    """As every failed load: what follows is the policy's, and P frees the blocks at once."""
    reading(world)
    world.d.builds_none = world.d.mover.broken = True
    world.d.mover.stuck = False
    world.run(seconds=1)

    assert "the backend is broken" in world.d.result("d-a").failure
    assert why(world)[1:] == [LeaseEvent.DROPPED]
    assert counted(world, "backends_not_rebuilt", "backends_rebuilt") == [1, 0]
    assert "could not be built again: no device" in caplog.text


def test_a_peer_that_dies_costs_no_backend(world, caplog):
    """Its side channel closes at the same time: the load fails at once, and nothing is tried again."""
    caplog.set_level(logging.WARNING)
    reading(world)
    world.d.mover.stuck = False
    world.p.die()
    world.run(seconds=1)

    assert world.d.result("d-a").failure
    assert counted(world, "transfers_retried", "backends_rebuilt", "loads_failed_peer") == [0, 0, 1]
    assert "built again" not in caplog.text


def test_reads_that_stall_while_the_peer_answers_get_another_backend(world):
    """The first one fails at its timeout. Where its bytes may still land stays quarantined, whoever reads meanwhile."""
    stalled = reading(world)
    before = world.d.mover
    before.clinging = True
    world.run(seconds=TIMEOUT + 1)
    assert world.d.result("d-a").quarantined
    into = begin(world, "b")
    world.run(seconds=1)

    assert world.d.bytes_of(into)[0] == b"p-b/0"
    assert counted(world, "backends_rebuilt") == [1]
    assert not set(stalled) & set(world.d.free)
    assert world.d.recovering.backends == 2
    before.stuck = before.clinging = False
    world.run(seconds=1)
    assert set(stalled) <= set(world.d.free)
    assert world.d.bytes_of(into)[0] == b"p-b/0"
    assert world.d.recovering.backends == 1
    assert counted(world, "connections_replaced") == [0], "what was given up says nothing of the present one"


def test_backends_that_all_stall_are_no_more_than_a_few(world):
    """What nothing ends must not use up the machine's memory."""
    for number in range(2 * MAX_REBUILDS):
        world.d.mover.stuck = world.d.mover.clinging = True
        begin(world, f"o{number}")
        world.run(seconds=PERIOD, step=5.0)

    assert world.d.recovering.backends <= MAX_REBUILDS + 1


def test_a_stalled_read_is_not_tried_again(world):
    """NIXL may still write into its blocks: only its end frees them."""
    reading(world)
    world.d.mover.clinging = True
    world.run(seconds=TIMEOUT + 1)
    begin(world, "b")
    world.run(seconds=1)

    assert counted(world, "transfers_retried") == [0]
    assert world.d.result("d-a").failure


def test_a_read_that_is_given_up_says_nothing_of_its_connection(world):
    """It ends as failed, also where NIXL has read everything."""
    reading(world)
    world.d.reader.give_up("this engine goes to sleep", now=world.now)
    world.d.mover.stuck = False
    world.run(seconds=1)

    assert counted(world, "connections_replaced", "transfers_retried") == [0, 0]


def test_a_transfer_that_waits_for_its_next_try_ends_when_its_peer_is_forgotten():
    """Else its owner would hold the blocks for ever."""
    network = InMemoryNetwork()
    network.memories = {name: [b""] * 2 for name in "pd"}
    backend = InMemoryTransferAgent(network, "d")
    agent = RecoveringAgent(backend, lambda: None, Counters(), timeout=TIMEOUT, clock=lambda: 0.0)
    handle = agent.attach(rank_info("p"))
    backend.lose("p")
    xfer = agent.read(handle, np.array([[0, BLOCK_BYTES, BLOCK_BYTES]]))
    assert agent.poll() == []
    agent.detach(handle)
    (ended,) = agent.poll()

    assert (ended.xfer, ended.outcome, ended.reason) == (xfer, XferOutcome.FAILED, "the connection is broken")
    assert agent.poll() == []


def pushed(world, into, request="d-a", name="t"):
    result = world.d.result(request)
    return result is not None and not result.failure and world.d.bytes_of(into) == world.right_bytes(name, range(3))


@pytest.mark.parametrize("what", ["the connection", "the backend"])
def test_a_write_that_breaks_is_written_again_into_what_is_lent(what):
    """D hears nothing of it, and uses its blocks when P says that all is written."""
    world = PushWorld()
    world.p.movers[0].stuck = True
    into = world.expect()
    world.prefill()
    world.run()
    world.p.movers[0].stuck = False
    if what == "the connection":
        world.p.movers[0].lose("d0/0")
    else:
        world.p.movers[0].broken = True
    world.run(seconds=1)

    assert pushed(world, into)
    assert why(world) == [LeaseEvent.DONE]
    assert len(world.p.movers) == (1 if what == "the connection" else 2)
    assert world.p.worker_tally.take_report().counters["transfers_retried"] in (1, 2)


def test_writes_that_stall_while_the_reader_asks_for_more_get_another_backend():
    """What the first one may still write into stays lent until it is over."""
    world = PushWorld()
    world.p.movers[0].stuck = world.p.movers[0].clinging = True
    first = world.expect()
    world.prefill()
    world.run(seconds=WRITE + 1)
    second = world.expect("d-b", "u")
    world.prefill("u")
    world.run(seconds=1)

    assert pushed(world, second, "d-b", "u")
    assert set(first).isdisjoint(world.d.free)
    world.heal()
    world.run(seconds=1)
    assert set(first) <= set(world.d.free)
    assert pushed(world, second, "d-b", "u")
