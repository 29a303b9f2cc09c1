"""One thread, both roles: who gets to hear what."""

import pytest

from pdrelay_connector.core.control import PUBLISH_AFTER, ControlPlane
from pdrelay_connector.core.ids import ConnId, RequestId
from pdrelay_connector.core.lease.lease_table import LeaseEnded, LeaseEvent
from pdrelay_connector.core.messages import Objection, RankMemory, RegisterPush, RenewLeases, WorkerHello
from pdrelay_connector.core.ports import MessageReceived
from pdrelay_connector.core.results import NumbersDue, PeerObjects
from pdrelay_connector.core.session.worker_links import WorkerLinks
from pdrelay_connector.core.staging.decode_scheduler import StagingReceiver
from pdrelay_connector.core.staging.slots import Slots
from support.engines import FINGERPRINT, LEASE, World, changed, lent, rank_info
from support.push_engines import PushWorld, right_bytes
from support.staging_world import StagingWorld


@pytest.fixture
def world():
    return World()


def test_an_engine_can_lend_and_borrow_at_once(world):
    """kv_role kv_both: connections it opened are the borrower's, those it accepted the lender's."""
    there = world.lend()
    world.start_renewing(there)
    back = world.d.prefill("d-b", 2, now=0.0)
    world.p.control.lease_renewer.start_renewing(RequestId("p-b"), back, now=0.0)
    world.run(seconds=2 * LEASE)

    assert len(world.p.leases) == len(world.d.leases) == 1
    assert world.p.counters.take_report().counters.keys() == world.d.counters.take_report().counters.keys()


def test_a_message_of_an_engine_we_borrow_from_is_not_taken_for_a_borrowers(world):
    """A prefill engine cannot renew our leases over the connection we opened to it."""
    world.start_renewing(world.lend())
    world.run()
    own = world.d.prefill("d-x", 1, now=0.0).remote_request_id
    (peer,) = world.d.peers._peers.values()
    world.d.control.on(MessageReceived(peer.conn, RenewLeases((own,))), now=0.0)

    assert len(world.d.peers) == 0
    assert world.d.leases.next_expiry() == LEASE


def test_the_thread_wakes_for_whichever_half_is_due_first(world):
    """A heartbeat or the end of a lease."""
    control = world.d.control
    assert control.advance(now=0.0) is None
    world.d.prefill("d-x", 1, now=0.0)
    assert control.advance(now=0.0) == LEASE
    world.start_renewing(world.lend())

    assert control.advance(now=0.0) == LEASE / 6


def test_an_unknown_connection_belongs_to_the_prefill_role(world):
    """A connection we did not open."""
    world.d.prefill("d-x", 1, now=0.0)
    world.d.control.on(MessageReceived(ConnId(77), RenewLeases((RequestId("d-x"),))), now=1.0)

    assert world.d.leases._leases[RequestId("d-x")].holder == 77


def test_both_engines_hear_why_they_share_nothing():
    """The operator of either reads one sentence with both values, and learns which of the two has the new weights."""
    world = World(d={"fingerprint": changed(FINGERPRINT, weights="w1")})
    world.start_renewing(world.lend())
    world.run()

    sentence = (
        "it serves another model, or another revision of it: its weights are 'w0', ours are 'w1'; they must be equal"
    )
    assert world.d.peers.get("p0").reason == sentence
    assert world.p.control.lease_manager.take_objections() == [PeerObjects("d0", sentence)]
    assert world.p.control.lease_manager.take_objections() == []
    assert world.p.counters.take_report().counters["objections"] == 1


def test_an_objection_cannot_forge_lines_of_the_log(world):
    """It comes from another process."""
    world.p.control.on(MessageReceived(ConnId(77), Objection("a\nWARNING b")), now=0.0)

    assert [each.reason for each in world.p.control.lease_manager.take_objections()] == ["a?WARNING b"]


def test_numbers_alone_have_the_engine_step_after_a_second(world):
    """Not at once: most are collected with a step that the engine makes anyway."""
    numbers = []
    p, d = world.p.control, world.d.control
    control = ControlPlane(
        p.lease_manager, d.lease_renewer, world.d.peers, p.counters, has_numbers=lambda: bool(numbers)
    )
    assert (control.advance(now=0.0), control.take_results(now=0.0)) == (None, [])
    numbers.append(1)
    assert (control.advance(now=5.0), control.take_results(now=5.0)) == (5.0 + PUBLISH_AFTER, [])
    control.advance(now=5.0 + PUBLISH_AFTER)
    assert control.take_results(now=5.0 + PUBLISH_AFTER) == [NumbersDue()]
    assert control.take_results(now=5.0 + PUBLISH_AFTER) == []
    numbers.clear()

    assert (control.advance(now=9.0), control.take_results(now=9.0)) == (None, [])


@pytest.mark.parametrize("part", ["push_coordinator", "push_receiver"])
def test_an_engine_that_pulls_has_no_core_of_push(world, part):
    """A bug of ours, not a wrong text."""
    with pytest.raises(RuntimeError, match="push"):
        getattr(world.p.control, part)


def test_what_is_staged_ends_with_its_lease(world):
    """Its slots are another request's then."""
    staging = StagingWorld()
    p = staging.p
    request = staging.p.lend(2)
    staging.load(request, size=2)
    staging.run()
    control = ControlPlane(
        p.lease_manager,
        world.d.control.lease_renewer,
        world.d.peers,
        p.counters,
        staging_coordinator=p.staging_coordinator,
    )
    assert p.slots.granted == 2
    control.advance(now=LEASE)

    assert control.take_results(now=LEASE) == [LeaseEnded(request, LeaseEvent.EXPIRED)]
    assert p.slots.granted == 0


def test_two_engines_can_push_to_each_other():
    """kv_role kv_both: each is the other's guest and host, and its own workers are guests of neither."""
    world = PushWorld()
    there = world.expect()
    world.prefill()
    assert world.d.begin("u", 2)
    world.p.start_renewing("p-a", "u", world.d, now=0.0)
    back = world.p.expect("p-a", "u", world.d, 2, now=0.0)
    assert world.d.lend("u", now=0.0)
    world.run()

    assert world.d.bytes_of(there) == right_bytes("t", range(3), 1)
    assert world.p.bytes_of(back) == right_bytes("u", range(2), 1)
    assert world.p.result("p-a").failure == world.d.result("d-a").failure == ""


def test_a_message_of_an_engine_that_writes_here_is_not_taken_for_a_readers():
    """A prefill engine cannot register at us over the connection we opened to it."""
    world = PushWorld()
    world.expect()
    world.run()
    (peer,) = world.d.peers._peers.values()
    world.d.control.on(MessageReceived(peer.conn, RenewLeases((RequestId("x"),))), now=0.0)

    assert world.d.peers.find(peer.conn) is None
    assert len(world.d.push_coordinator._remembered) == 0
    assert world.d.push_receiver._pushes[RequestId("d-a")].state.name == "QUARANTINED"


def test_an_engine_that_poses_as_our_worker_leaves_nothing_behind():
    """Its connection is closed, so no event says that it is gone: pushes of it would stay open for ever."""
    p = PushWorld().p
    staging_receiver = StagingReceiver(p.link, p.counters, WorkerLinks(p.link, {0: b"token"}), Slots([4]))
    control = ControlPlane(
        p.control.lease_manager,
        p.control.lease_renewer,
        p.peers,
        p.counters,
        push_coordinator=p.push_coordinator,
        push_receiver=p.push_receiver,
        staging_receiver=staging_receiver,
    )
    order = RegisterPush(RequestId("d-a"), RequestId("t"), "digest", lent(0, [1]))
    for message in (RankMemory(rank_info("d")), order, WorkerHello(0, b"guessed", receives_pushes=True)):
        control.on(MessageReceived(ConnId(77), message), now=0.0)

    assert not p.push_coordinator.may_write
    assert p.push_coordinator._peers == {}


def test_the_thread_wakes_for_a_landing():
    """Its deadline, or the end of our patience with P."""
    world = PushWorld()
    assert world.d.control.advance(now=0.0) is None
    world.expect()

    assert world.d.control.advance(now=0.0) == LEASE / 6
