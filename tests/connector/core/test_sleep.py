"""Engines that sleep: nobody reads their memory, writes into it or meets them, and who wakes is another engine."""

import pytest

from pdrelay_connector.core.control import ASLEEP, ControlPlane
from pdrelay_connector.core.ids import EngineId
from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
from pdrelay_connector.core.lease.lease_table import LeaseEvent
from pdrelay_connector.core.results import FellAsleep
from pdrelay_connector.core.session.peers import PeerTable
from pdrelay_connector.core.sleep import TRANSITIONS, Sleep, SleepEvent, SleepState, in_generation, known_as
from pdrelay_connector.errors import IllegalTransition
from support.engines import FINGERPRINT, LEASE, TIMEOUT, World
from support.push_engines import PushWorld
from support.staging_world import StagingWorld

PATIENCE = 2 * TIMEOUT


def sleep(world, engine):
    engine.control.fall_asleep(until=world.now + PATIENCE)


def being_pushed():
    """A prefill whose first two blocks are computed, and written with its next step."""
    world = PushWorld()
    world.expect()
    world.run()
    world.prefill(chunk=2)
    return world


@pytest.mark.parametrize("state", SleepState)
@pytest.mark.parametrize("event", SleepEvent)
def test_what_is_not_in_the_table_raises(state, event):
    """An engine that is woken twice would have two generations."""
    life = Sleep()
    life.state = state
    if event in TRANSITIONS[state]:
        life.on(event)
        assert life.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition):
            life.on(event)


def test_each_generation_has_an_id_and_all_have_one_name():
    """Peers must not take one for another, and a router that read the metrics of the first must find them."""
    engine = EngineId("7c0e_dp1")
    ids = [in_generation(engine, number) for number in range(3)]

    assert ids == ["7c0e_dp1", "7c0e_dp1_gen1", "7c0e_dp1_gen2"]
    assert {known_as(each) for each in ids} == {engine}


def test_leases_are_given_up_and_their_holders_are_told():
    """What waits there computes its own prompt."""
    world = World()
    lost = []
    world.d.on_lost = lost.append
    world.start_renewing(world.lend())
    world.run()
    sleep(world, world.p)
    world.run()

    assert [ended.reason for ended in world.p.freed] == [LeaseEvent.REVOKED]
    assert lost == ["d-a"]
    assert world.p.slept == [FellAsleep()]


def read_that_hangs():
    """A world in which D has begun to read what P has lent."""
    world = World()
    offer = world.lend()
    world.start_renewing(offer)
    world.run()
    world.d.mover.stuck = True
    world.load(offer)
    world.run()
    return world


def test_a_read_that_has_begun_ends_before_the_memory_goes_and_does_not_count():
    """Over TCP UCX reads for the peer, in this process, which a page that is gone would end."""
    world = read_that_hangs()
    sleep(world, world.p)
    world.run(seconds=TIMEOUT / 4)
    assert world.p.slept == []
    world.d.mover.stuck = False
    world.run(seconds=1.0)

    assert world.p.slept == [FellAsleep()]
    assert "lease was over" in world.d.result("d-a").failure


def test_a_reader_that_hangs_keeps_an_engine_awake_no_longer_than_its_own_timeout():
    """By then it has given the read up, and told so; one that has not is gone."""
    world = read_that_hangs()
    world.d.frozen = True
    sleep(world, world.p)
    world.run(seconds=TIMEOUT + 1)

    assert world.p.slept == [FellAsleep()]


def test_who_comes_while_an_engine_sleeps_hears_why_it_is_refused():
    """Else the log of the decode engine would speak of a port that is closed, or of a wrong model."""
    world = World()
    offer = world.lend()
    sleep(world, world.p)
    world.run()
    world.start_renewing(offer)
    world.run()

    peer = world.d.peers.get(offer.remote_engine_id)
    assert peer.is_incompatible
    assert ASLEEP in peer.reason


def test_an_engine_that_sleeps_gives_back_what_it_has_leased():
    """Its prefill engine needs the blocks, and must not wait for the end of the lease."""
    world = World()
    lost = []
    world.d.on_lost = lost.append
    world.start_renewing(world.lend())
    world.run()
    sleep(world, world.d)
    world.run()

    assert lost == ["d-a"]
    assert [ended.reason for ended in world.p.freed] == [LeaseEvent.DROPPED]
    assert world.d.slept == [FellAsleep()]


def test_no_push_is_written_into_an_engine_that_sleeps():
    """It goes when the prefill engine has said that no worker of its writes any more."""
    world = being_pushed()
    world.p.movers[0].stuck = world.p.movers[0].clinging = True
    world.prefill(chunk=1)
    world.run(seconds=1.0)
    assert world.p.movers[0]._xfers
    sleep(world, world.d)
    world.run(seconds=1.0)
    assert (world.d.slept, world.d.results["d-a"].quarantined) == ([], True)
    world.heal()
    world.run(seconds=1.0)

    assert world.d.slept == [FellAsleep()]
    assert world.d.lent == {}


def test_an_engine_stays_awake_while_a_push_may_arrive():
    """The memory must not go, and come back, under what a silent engine has sent: it would be in another's blocks."""
    world = being_pushed()
    world.cut(world.p, "both")
    sleep(world, world.d)
    world.run(seconds=PATIENCE + 1)

    assert ["1 pushes of other engines" in each.failure for each in world.d.slept] == [True]
    world.heal()
    world.run(seconds=60.0)
    sleep(world, world.d)
    world.run(seconds=1.0)
    assert world.d.slept[1:] == [FellAsleep()]


def test_a_prefill_engine_that_sleeps_stops_its_pushes_first():
    """What its workers write comes from memory that goes."""
    world = being_pushed()
    world.p.movers[0].stuck = world.p.movers[0].clinging = True
    world.prefill(chunk=1)
    world.run(seconds=1.0)
    assert world.p.movers[0]._xfers
    sleep(world, world.p)
    world.run(seconds=1.0)
    assert world.p.slept == []
    world.heal()
    world.run(seconds=1.0)

    assert world.p.slept == [FellAsleep()]
    assert "goes to sleep" in world.d.results["d-a"].failure


def test_who_tells_of_the_end_of_a_read_counts_once_for_each_rank():
    """Two ranks read a lease: the memory stays until both have."""
    world = World()
    leases = world.p.leases
    world.lend()
    leases.read("p-a", now=0.0)
    leases.end("p-a", LeaseEvent.REVOKED)
    leases.late_read_ended("p-a", 0, 2)
    leases.late_read_ended("p-a", 0, 2)
    assert leases.has_late_reads(now=1.0)
    leases.late_read_ended("p-a", 1, 2)

    assert not leases.has_late_reads(now=1.0)


def test_copies_into_host_memory_are_waited_for():
    """A worker copies a part out of the cache for an engine that has given up: the cache stays until then."""
    world = StagingWorld()
    p = world.p
    (copier,) = p.copiers
    copier.stuck = True
    world.load(p.lend(2), size=2)
    world.run()
    peers = PeerTable(p.link, FINGERPRINT, p.counters, retry_after=1.0)
    renewer = LeaseRenewer(p.link, peers, p.counters, heartbeat_interval=LEASE / 6)
    control = ControlPlane(
        p.lease_manager, renewer, peers, p.counters,
        staging_coordinator=p.staging_coordinator, close_all=p.link.close_all,
    )  # fmt: skip
    control.fall_asleep(until=world.now + PATIENCE)
    world.run()
    control.advance(now=world.now)

    assert (len(copier), control.take_results(now=world.now)) == (1, [])
    copier.stuck = False
    world.run()
    control.advance(now=world.now)
    assert control.take_results(now=world.now) == [FellAsleep()]
