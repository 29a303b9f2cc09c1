"""A prefill and a decode engine together: the stories that decide whether an operator sleeps."""

import pytest
from hypothesis import settings

from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.lease.kv_params import PullParams
from pdrelay_connector.core.lease.lease_table import LeaseEvent
from pdrelay_connector.core.pull.load import LoadState
from pdrelay_connector.core.results import LoadResult
from support import pull_mutants as mutants
from support.engines import BLOCKS, FINGERPRINT, LEASE, LOOP_TIMEOUT, TIMEOUT, World, changed, right
from support.mutation import NOTICED, each_mutant, search
from support.pair_machine import PairMachine
from support.searching import examples

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
    return [released.reason for released in world.p.freed]


def test_blocks_arrive_and_are_freed_at_once(world):
    """The main path: no time needs to pass."""
    into = world.load(borrowed(world))
    world.run()

    assert world.d.bytes_of(into) == RIGHT
    assert world.d.result("d-a").failure == ""
    assert why(world) == [LeaseEvent.DONE]
    assert len(world.p.free) == BLOCKS


def test_a_request_that_queues_keeps_its_lease(world):
    """An overloaded D must not lose what P has computed."""
    offer = borrowed(world)
    world.run(seconds=5 * LEASE)
    into = world.load(offer)
    world.run()

    assert world.d.bytes_of(into) == RIGHT
    assert why(world) == [LeaseEvent.DONE]


@pytest.mark.parametrize("lease", [6.0, 4 * LEASE], ids=["shorter", "longer"])
def test_a_request_that_queues_keeps_a_lease_of_another_length(lease):
    """P at ``kv_lease_duration`` 6 and D at its default: the lease was lost after 9 s, the prompt computed twice."""
    world = World(p={"lease": lease})
    offer = borrowed(world)
    world.run(seconds=5 * LEASE, step=0.5)
    world.load(offer)
    world.run()

    assert world.d.result("d-a").failure == ""
    assert why(world) == [LeaseEvent.DONE]


def test_a_load_that_queues_for_host_memory_keeps_its_lease_from_being_revoked(world):
    """However long: P would take the blocks of what D is about to read, and D compute the prompt."""
    offer = borrowed(world)
    world.d.control.lease_renewer.read_started("d-a", offer.remote_engine_id)  # its worker waits for room
    world.run(seconds=3 * TIMEOUT)
    world.p.revoke("p-a", now=world.now)
    into = world.load(offer)
    world.run()

    assert world.d.bytes_of(into) == RIGHT
    assert why(world) == [LeaseEvent.DONE]


def test_unread_blocks_are_freed_at_lease_end(world):
    """A client, router or D that disappears must not pin P's memory."""
    world.lend()
    world.run(seconds=LEASE - 1)
    assert why(world) == []
    world.run(seconds=1)

    assert why(world) == [LeaseEvent.EXPIRED]


@pytest.mark.parametrize("have_met", [True, False])
def test_a_request_that_is_not_wanted_is_given_back_at_once(world, have_met):
    """Aborted in the queue, or found in the local prefix cache; if the engines still meet, as soon as they have."""
    offer = borrowed(world)
    if have_met:
        world.run()
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
    world.run(seconds=LEASE - 1)
    assert why(world) == []  # its early renewal cost no time
    world.run(seconds=2)

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

    assert world.d.bytes_of(into) == [b"reused"] * 3
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
    offer = world.lend()
    good = other.prefill("p-b", 2, now=0.0)
    world.p.die()
    world.load(offer)
    world.load(good, "b")
    world.run()
    world.load(offer, "c")
    world.run()

    assert "cannot connect" in world.d.result("d-a").failure
    assert "cannot connect" in world.d.result("d-c").failure
    assert world.d.result("d-b").failure == ""


def test_an_offer_ends_the_pause_of_an_engine_that_was_away(world):
    """It has computed a prompt since: for the rest of a pause of up to 30 s prompts were computed twice."""
    offer = world.lend()
    listeners = world.network._listeners
    world.network._listeners = {}
    world.load(offer)
    world.run()
    world.network._listeners = listeners
    into = world.load(offer, "b")
    world.run()

    assert "cannot connect" in world.d.result("d-a").failure
    assert world.d.bytes_of(into) == RIGHT


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
    assert world.d.bytes_of(into) == [b"p-b/0", b"p-b/1", b"p-b/2"]
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

    assert world.d.bytes_of(first) == RIGHT
    assert world.d.bytes_of(second) == [b"reused"] * 3
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
    assert world.d.bytes_of(into) != RIGHT
    assert world.d.result("d-a").failure


def test_counts_tell_the_story(world):
    """What an operator sees in Prometheus."""
    offer = borrowed(world)
    world.load(offer)
    world.run(seconds=6)
    world.lend("b")
    world.run(seconds=LEASE)
    p, d, worker = (counters.take_report() for counters in (world.p.counters, world.d.counters, world.d.worker_tally))

    assert p.counters["leases_granted"] == 2
    assert p.counters["leases_done"] == p.counters["leases_expired"] == 1
    assert d.counters["renewals_sent"] == p.counters["leases_renewed"] + p.counters.get("unknown_transfer_messages", 0)
    assert worker.counters["loads"] == worker.counters["handshakes"] == 1
    assert sum(sample.bytes for sample in worker.transfers) == 3 * 64
    assert {sample.peer for sample in worker.transfers} == {"p0"}


def test_a_load_is_read_from_every_rank():
    """Each keeps some of the heads."""
    world = World(p={"ranks": 2, "heads": 2}, d={"heads": 2})
    into = world.load(world.lend())
    world.run()

    assert world.d.bytes_of(into) == [right("p-a", number, head) for number in range(3) for head in range(2)]


def test_a_load_waits_for_every_rank():
    """Some of the heads are no answer."""
    world = World(p={"ranks": 2, "heads": 2}, d={"heads": 2})
    world.network.cut(world.p.other_links[0], is_cut=True)
    world.load(world.lend())
    world.run()

    assert world.d.result("d-a") is None


def test_a_lease_that_is_revoked_while_it_is_read_is_noticed(world):
    """D's word that it reads is lost: P gives the blocks to another, and what D has read must not become an answer."""
    offer = borrowed(world)
    world.run()
    world.d.mover.stuck = True
    into = world.load(offer)
    world.d.control.lease_renewer._pending.clear()
    world.run()
    world.p.revoke("p-a", now=world.now)
    world.run()
    world.d.mover.stuck = False
    world.run()

    assert world.d.bytes_of(into) == [b"reused"] * 3
    assert "lease" in world.d.result("d-a").failure


def test_what_is_read_is_not_revoked(world):
    """The request would fail for it."""
    offer = borrowed(world)
    world.d.mover.stuck = True
    world.load(offer)
    world.run()
    world.p.revoke("p-a", now=world.now)
    world.run()
    world.d.mover.stuck = False
    world.run()

    assert world.d.result("d-a").failure == ""


def test_what_is_not_said_to_be_read_any_more_is_revoked_in_the_end():
    """D has vanished in the middle of a read; its lease would last longer."""
    world = World(p={"timeout": TIMEOUT / 2})
    offer = borrowed(world)
    world.d.mover.stuck = True
    world.load(offer)
    world.run()
    world.d.frozen = True
    world.run(seconds=TIMEOUT / 2)
    world.p.revoke("p-a", now=world.now)
    world.run()

    assert why(world) == [LeaseEvent.REVOKED]


def test_a_revoked_lease_is_told_at_once(world):
    """Its request computes its prompt, instead of reading in vain."""
    lost = []
    world.d.on_lost = lost.append
    borrowed(world)
    world.run()
    world.p.revoke("p-a", now=world.now)
    world.run()

    assert lost == ["d-a"]
    assert len(world.d.control.lease_renewer) == 0
    assert len(world.p.free) == BLOCKS


def test_another_engine_cannot_keep_blocks(world):
    """Whoever knows a request could fill P."""
    borrowed(world)
    world.run()
    world.d.frozen = True
    other = world.start("d1", 5701)
    other.control.lease_renewer.start_renewing(
        "d-x", PullParams("p0", "p-a", *world.p.address, ((1,),), 4), now=world.now
    )
    world.run(seconds=2 * LEASE)

    assert why(world) == [LeaseEvent.EXPIRED]


def test_another_engine_cannot_end_a_lease():
    """Its blocks would be freed under the engine that reads them."""
    world = World(d={"timeout": 1000.0})
    offer = borrowed(world)
    world.run()
    other = world.start("d1", 5701)
    other.load("d-x", offer, now=world.now)
    world.run()

    assert "lease" in other.result("d-x").failure
    assert world.p.freed == []
    assert world.p.counters.take_report().counters["foreign_messages"] == 1


def test_an_engine_that_hangs_renews_nothing(world):
    """Nobody will read what P keeps for it."""
    borrowed(world)
    world.run()
    world.d.turned_at = world.now
    world.run(seconds=LOOP_TIMEOUT - LEASE)
    assert world.p.freed == []
    world.run(seconds=2 * LEASE)

    assert why(world) == [LeaseEvent.EXPIRED]
    assert world.d.counters.take_report().counters["renewals_withheld"] > 0


def test_blocks_are_not_given_back_while_nixl_may_still_write_into_them(world):
    """The request fails in time; its blocks are free when NIXL has let go, however late that is."""
    world.d.mover.stuck = world.d.mover.clinging = True
    world.load(world.lend())
    world.run(seconds=TIMEOUT)
    assert world.d.result("d-a") == LoadResult(RequestId("d-a"), "not loaded within 20 s", quarantined=True)
    world.run(seconds=100)
    assert len(world.d.free) == BLOCKS - 3
    world.d.mover.clinging = False
    world.run()

    assert len(world.d.free) == BLOCKS
    assert world.d.worker_tally.take_report().counters["loads_failed_timeout"] == 1


def test_a_load_being_given_up_survives_that_its_peer_is_met_again(world):
    """It must neither be started a second time, which would end the thread, nor end early."""
    world.d.mover.stuck = world.d.mover.clinging = True
    world.load(world.lend())
    world.run(seconds=TIMEOUT)
    world.d.mover.stuck = False
    into = world.load(world.lend("b"), "b")
    world.run()

    assert world.d.reader._loads["d-a"].state is LoadState.ABORTING
    assert world.d.bytes_of(into) == [b"p-b/0", b"p-b/1", b"p-b/2"]


PairMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPair = pytest.mark.slow(PairMachine.TestCase)  # any order of events: seconds


@each_mutant(
    mutants.revoke_without_a_word_to_the_fence,
    mutants.accept_unfenced_reads,
    mutants.answer_the_fence_from_memory,
    mutants.never_expire,
    mutants.release_twice,
    mutants.read_from_whoever_answers,
    mutants.keep_what_nobody_wants,
)
def test_a_broken_rule_is_noticed(monkeypatch, mutate):
    """Each mutant is one rule of the design turned off; its name says which promise it breaks."""
    mutate(monkeypatch)

    with pytest.raises(NOTICED):
        search(PairMachine, 200)
