"""A prefill and a decode engine together: the stories that decide whether an operator sleeps."""

import pytest

from support.engines import BLOCKS, FINGERPRINT, LEASE, TIMEOUT, World, changed
from xpyd_connector.core.lease.lease_table import LeaseEvent

RIGHT = [b"p-a/0", b"p-a/1", b"p-a/2"]


@pytest.fixture
def world():
    return World()


def borrowed(world):
    """A request whose prompt P has computed and which has just arrived at D."""
    offer = world.lend()
    world.start_renewing(offer)
    return offer


def why(world):
    return [released.why for released in world.p.freed]


def test_blocks_arrive_and_are_freed_at_once(world):
    """The main path: no time needs to pass."""
    into = world.load(borrowed(world))
    world.run()

    assert world.bytes_of(into) == RIGHT
    assert world.d.result("d-a").failure == ""
    assert why(world) == [LeaseEvent.DONE]
    assert len(world.p.free) == BLOCKS


def test_a_request_that_queues_keeps_its_lease(world):
    """An overloaded D must not lose what P has computed."""
    offer = borrowed(world)
    world.run(seconds=5 * LEASE)
    into = world.load(offer)
    world.run()

    assert world.bytes_of(into) == RIGHT
    assert why(world) == [LeaseEvent.DONE]


def test_a_load_that_queues_for_host_memory_keeps_its_lease_from_being_revoked(world):
    """However long: P would take the blocks of what D is about to read, and D compute the prompt."""
    offer = borrowed(world)
    world.d.control.lease_renewer.read_started("d-a", offer.remote_engine_id)  # its worker waits for room
    world.run(seconds=3 * TIMEOUT)
    world.p.revoke("p-a", now=world.now)
    into = world.load(offer)
    world.run()

    assert world.bytes_of(into) == RIGHT
    assert why(world) == [LeaseEvent.DONE]


def test_unread_blocks_are_freed_at_lease_end(world):
    """A client, router or D that disappears must not pin P's memory."""
    world.lend()
    world.run(seconds=LEASE - 1)
    assert why(world) == []
    world.run(seconds=1)

    assert why(world) == [LeaseEvent.EXPIRED]


def test_a_request_that_is_not_wanted_is_given_back_at_once(world):
    """Aborted in the queue, or found in the local prefix cache."""
    offer = borrowed(world)
    world.run()
    world.release(offer)
    world.run()

    assert why(world) == [LeaseEvent.DROPPED]
    assert len(world.d.control.lease_renewer) == 0


def test_a_request_given_back_before_the_first_contact_is_given_back_after_it(world):
    """The rejection of the very first request is not lost while the engines still meet."""
    offer = borrowed(world)
    world.release(offer)
    world.run()

    assert why(world) == [LeaseEvent.DROPPED]
    assert len(world.d.control.lease_renewer) == 0


def test_a_crashed_decode_engine_is_noticed_at_once(world):
    """Not at lease end."""
    borrowed(world)
    world.run()
    world.d.die()
    world.run()

    assert why(world) == [LeaseEvent.PEER_LOST]


def test_a_decode_engine_that_is_cut_off_is_noticed_at_lease_end(world):
    """The lease is the backstop for what no closed connection tells."""
    borrowed(world)
    world.run()
    world.network.cut(world.d.link, is_cut=True)
    world.run(seconds=LEASE + 1)

    assert why(world) == [LeaseEvent.EXPIRED]


def test_a_read_that_outlives_its_lease_does_not_count():
    """D freezes, P reuses the blocks, D thaws: other people's KV must not become an answer."""
    world = World(d={"timeout": 1000.0})
    offer = borrowed(world)
    world.run()
    into = world.load(offer)
    world.d.frozen = True
    world.run(seconds=LEASE + 1)
    world.d.frozen = False
    world.run()

    assert world.bytes_of(into) == [b"reused"] * 3
    assert "lease" in world.d.result("d-a").failure


def test_a_dead_prefill_engine_fails_the_load_at_once(world):
    """And frees what D allocated, through vLLM's failure policy."""
    offer = borrowed(world)
    world.run()
    world.d.mover.stuck = True
    world.load(offer)
    world.run()
    world.p.die()
    world.run()

    assert "closed" in world.d.result("d-a").failure
    assert len(world.d.reader) == len(world.d.worker_peers) == 0


def test_a_hung_prefill_engine_fails_the_load_after_the_timeout(world):
    """Nothing waits longer, and the next request meets the engine anew."""
    offer = borrowed(world)
    world.run()
    world.d.mover.stuck = True
    world.load(offer)
    world.run(seconds=TIMEOUT - 1)
    assert world.d.result("d-a") is None
    world.run(seconds=1)

    assert "20 s" in world.d.result("d-a").failure
    assert len(world.d.worker_peers) == 0


def test_an_unreachable_prefill_engine_fails_only_what_waits_for_it(world):
    """With a pause before the next try, that grows."""
    other = world.start("p1", 5601)
    offer, good = world.lend(), other.prefill("p-b", 2, now=0.0)
    world.p.die()
    world.load(offer)
    world.load(good, "b")
    world.run()
    world.load(offer, "c")
    world.run()

    assert "cannot connect" in world.d.result("d-a").failure
    assert "cannot connect" in world.d.result("d-c").failure
    assert world.d.result("d-b").failure == ""


def test_a_refused_engine_is_met_after_the_pause(world):
    """A prefill engine that was late to start is not shut out for ever."""
    offer = world.lend()
    listeners, world.network._listeners = world.network._listeners, {}
    world.load(offer)
    world.run()
    world.network._listeners = listeners
    world.run(seconds=1.5)
    into = world.load(offer, "b")
    world.run()

    assert "cannot connect" in world.d.result("d-a").failure
    assert world.bytes_of(into) == RIGHT


def test_a_restarted_prefill_engine_is_another_peer(world):
    """Same address, new engine id: met again without restarting D, and the old one is forgotten."""
    world.load(borrowed(world))
    world.run()
    world.p.die()
    world.run()
    world.p = world.start("p0-again", 5600)
    offer = world.lend("b")
    into = world.load(offer, "b")
    world.run()

    assert world.d.result("d-b").failure == ""
    assert world.bytes_of(into) == [b"p-b/0", b"p-b/1", b"p-b/2"]
    assert len(world.d.worker_peers) == 1


def test_an_offer_of_an_engine_that_restarted_since_is_refused(world):
    """The address answers, but the blocks died with the engine that made the offer."""
    offer = world.lend()
    world.p.die()
    world.p = world.start("p0-again", 5600)
    world.load(offer)
    world.run()

    assert "engine p0-again answers" in world.d.result("d-a").failure


def test_an_incompatible_engine_is_refused_naming_both_values(world):
    """An operator reads this sentence at night."""
    other = world.start("p1", 5601, fingerprint=changed(FINGERPRINT, dtype="fp16"))
    world.load(other.prefill("p-a", 1, now=0.0))
    world.run()

    assert "its dtype is 'fp16', ours is 'bf16'" in world.d.result("d-a").failure


def test_two_requests_that_share_one_lease_are_both_right_or_recomputed(world):
    """n>1: the second read ends after the first one's ReadDone freed the blocks, so it must not count."""
    offer = borrowed(world)
    world.run()
    first = world.load(offer, "a")
    world.run()
    second = world.load(offer, "b")
    world.run()

    assert world.bytes_of(first) == RIGHT
    assert world.bytes_of(second) == [b"reused"] * 3
    assert world.d.result("d-b").failure


def test_a_decode_engine_with_two_ranks_ends_a_lease_only_when_both_have_read():
    """The blocks of the slower rank must not be freed under it."""
    world = World(p={"ranks": 2}, d={"ranks": 2})
    other = world.start("d1", 5701, rank=1, ranks=2)
    world.network.aliases["d1"] = "d0"
    offer = borrowed(world)
    world.load(offer)
    world.run()
    assert world.d.result("d-a").failure == ""
    assert why(world) == []
    other.load("d-a", offer, now=world.now)
    world.run()

    assert why(world) == [LeaseEvent.DONE]


def test_broken_connections_lose_leases_but_no_text(world):
    """Whatever the network resets, the load fails or is right."""
    offer = borrowed(world)
    world.run()
    world.network.lose()
    world.run()
    into = world.load(offer)
    world.run()

    assert why(world) == [LeaseEvent.PEER_LOST]
    assert world.bytes_of(into) != RIGHT
    assert world.d.result("d-a").failure


def test_counts_tell_the_story(world):
    """What an operator sees in Prometheus."""
    offer = borrowed(world)
    world.load(offer)
    world.run(seconds=6)
    world.lend("b")
    world.run(seconds=LEASE)
    p, d, worker = (counters.take() for counters in (world.p.counters, world.d.counters, world.d.worker_tally))

    assert p.counters["leases_granted"] == 2
    assert p.counters["leases_done"] == p.counters["leases_expired"] == 1
    assert d.counters["renewals_sent"] == p.counters["leases_renewed"] + p.counters.get("unknown_transfer_messages", 0)
    assert worker.counters["loads"] == worker.counters["handshakes"] == 1
    assert sum(sample.bytes for sample in worker.transfers) == 3 * 64
