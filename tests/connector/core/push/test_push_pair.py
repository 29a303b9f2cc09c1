"""Engines that push, together: the stories that decide whether an operator sleeps."""

import pytest
from hypothesis import settings

from pdrelay_connector.core.messages import DropLeases, HeartbeatReply
from pdrelay_connector.core.ports import ConnectionLost, MessageReceived
from pdrelay_connector.core.push.lost_peer import LONG_QUARANTINE, QUARANTINE
from pdrelay_connector.io.connection import USER_TIMEOUT_MS
from support import push_mutants as mutants
from support.engines import BLOCKS, LEASE
from support.mutation import NOTICED, each_mutant, search
from support.pair_machine import STRANGER
from support.push_engines import ORPHANED, PATIENCE, STRAYS, WAIT, WRITE, PushWorld
from support.push_machine import PushMachine, nothing_is_left
from support.searching import examples

SHAPES = {  # ranks of P and of D, KV heads
    "one rank": (1, 1, 1),
    "two ranks": (2, 2, 2),
    "two to one": (2, 1, 2),
    "one to two": (1, 2, 2),
    "replicated": (2, 1, 1),  # one of P's ranks has nothing to write
}


@pytest.fixture(params=["two to one", "one to two"])  # in the order of what is said, all are alike
def world(request):
    ranks, d_ranks, heads = SHAPES[request.param]
    return PushWorld(ranks=ranks, d_ranks=d_ranks, heads=heads)


in_any_shape = pytest.mark.parametrize("world", SHAPES, indirect=True)


def hang(world, *, hangs=True, clings=False):
    for mover in world.p.movers:
        mover.stuck, mover.clinging = hangs, clings


def has_landed(world, into, request="d-a", name="t", first=0):
    right = world.right_bytes(name, range(first, first + len(into)))
    return world.d.result(request) is not None and not world.d.result(request).failure and (
        world.d.bytes_of(into) == right
    )  # fmt: skip


def failure(world, request="d-a"):
    result = world.d.result(request)
    assert result is not None, f"{request} still waits"
    return result.failure


def assert_kept_until_healed(world, into, **wait):
    """Nothing uses these blocks of D while the fault lasts, and all are free when it is over."""
    assert set(into).isdisjoint(world.d.free)
    world.heal()
    world.run(**wait)
    assert len(world.d.free) == BLOCKS


def why(world):
    return [released.reason.name for released in world.p.freed]


@in_any_shape
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_blocks_arrive_whichever_leg_is_first(world, first):
    """The main path: no time needs to pass."""
    if first == "prefill":
        world.prefill()
        world.run()
    into = world.expect()
    world.run()
    if first == "decode":
        world.prefill()
        world.run()

    assert has_landed(world, into)
    assert why(world) == ["DONE"]
    assert len(world.p.free) == BLOCKS
    assert len(world.p.control.take_results(now=world.now)) == 0


@in_any_shape
def test_blocks_arrive_while_the_rest_is_computed(world):
    """That is what push is for."""
    into = world.expect()
    world.run()
    world.prefill(chunk=2)
    world.prefill(chunk=1)
    world.run()
    assert world.d.bytes_of(into[:2]) == world.right_bytes("t", range(2))
    assert world.d.result("d-a") is None
    world.prefill()
    world.run()

    assert has_landed(world, into)


@in_any_shape
def test_only_what_is_missing_is_written(world):
    """The decode engine has the beginning in its prefix cache."""
    into = world.expect(first=2)
    world.prefill()
    world.run()

    assert len(into) == 1
    assert has_landed(world, into, first=2)


@in_any_shape
def test_a_preempted_prefill_is_written_anew(world):
    """Its blocks were another's meanwhile, and so were the bytes that had been written."""
    into = world.expect()
    world.run()
    world.prefill(chunk=3)
    world.prefill(chunk=0)
    world.run()
    world.p.preempt("t")
    world.prefill("other", 3)
    world.prefill(chunk=1)
    world.run()
    assert world.d.result("d-a") is None
    world.prefill()
    world.run()

    assert has_landed(world, into)


def test_a_prefill_that_is_preempted_while_it_is_written_is_right(world):
    """What the first attempt sent is slow, and must not arrive after what the second one sends."""
    into = world.expect()
    world.run()
    hang(world)
    world.prefill(chunk=3)
    world.prefill(chunk=0)
    world.run()
    world.p.preempt("t")
    world.prefill()
    world.run()
    for mover in world.p.movers:
        flights = mover._xfers
        flights.update({number: flights.pop(number) for number in list(flights)[:1]})  # the oldest one arrives last
    hang(world, hangs=False)
    world.run()

    assert has_landed(world, into)


def test_a_prefill_that_is_aborted_fails_the_request_at_once(world):
    """It recomputes, in blocks that nobody writes into."""
    world.expect()
    world.prefill(chunk=2)
    world.run()
    world.p.abandon("t")
    world.run()

    assert "without handing its KV over" in failure(world)
    assert len(world.d.free) == BLOCKS


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_that_comes_when_p_closes_the_idle_connection_gets_its_blocks(world, first):
    """D's first words for an hour are lost with the connection."""
    world.expect()
    world.prefill()
    world.run()
    world.run(seconds=3600, step=300)
    if first == "prefill":
        world.prefill("u")
    into = world.expect("d-b", "u")
    (guest,) = world.p.push_coordinator._peers
    world.network.hang_up(world.p.link, guest)
    world.p.link.inbox.append(ConnectionLost(guest, "its engine sent no message"))
    world.run()
    if first == "decode":
        world.prefill("u")
    world.run()

    assert has_landed(world, into, "d-b", "u")
    assert why(world) == ["DONE", "DONE"]
    assert world.d.counters.take_report().counters["registrations_resent"] == 1


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_request_that_is_aborted_gives_everything_back(world, when):
    """On both engines, at once."""
    if when == "after":
        hang(world)
        world.prefill()
    elif when == "during":
        world.prefill(chunk=2)
        world.prefill(chunk=0)
    world.expect()
    world.run()
    world.stop()
    world.run()
    assert "aborted" in failure(world)
    assert len(world.d.free) == BLOCKS
    if when != "after":
        world.prefill()
    world.run()

    assert why(world) == ["DROPPED"]
    assert len(world.p.free) == BLOCKS


def test_blocks_of_an_aborted_request_wait_for_what_flies(world):
    """NIXL cannot stop a write."""
    hang(world, clings=True)
    world.prefill()
    into = world.expect()
    world.run()
    world.stop()
    world.run(seconds=WAIT)
    assert world.d.result("d-a").quarantined
    assert_kept_until_healed(world, into)


def test_a_write_that_hangs_fails_the_request_after_the_timeout(world):
    """Its blocks come back when the write has ended."""
    hang(world, clings=True)
    world.prefill()
    into = world.expect()
    world.run(seconds=WRITE)
    assert "within 20 s" in failure(world)
    assert_kept_until_healed(world, into)


def test_a_prefill_engine_that_hangs_is_noticed_by_its_silence(world):
    """Its connection stands, and so do its writes."""
    world.expect()
    world.run()
    world.p.frozen = True
    world.run(seconds=LEASE / 6 + PATIENCE + 1)
    assert "does not answer" in failure(world)
    assert len(world.d.free) < BLOCKS
    world.heal()
    world.run()

    assert len(world.d.free) == BLOCKS


def test_a_queue_at_the_prefill_engine_is_not_a_hang(world):
    """It answers heartbeats meanwhile, for as long as registrations wait."""
    into = world.expect()
    world.run(seconds=WAIT - 10)
    world.prefill()
    world.run()

    assert has_landed(world, into)


def test_a_dead_prefill_engine_fails_the_request_at_once_and_its_bytes_hit_no_other(world):
    """What it had sent lands while the blocks are still kept."""
    hang(world)
    world.prefill()
    into = world.expect()
    world.run()
    world.p.die()
    world.round()
    assert "is gone" in failure(world)
    assert set(into).isdisjoint(world.d.free)
    for _ in range(STRAYS):
        world.round()
    assert world.strays == []
    assert world.d.bytes_of(into) == world.right_bytes("t", range(3))
    world.run(seconds=QUARANTINE[0] * QUARANTINE[1], step=QUARANTINE[0])

    assert len(world.d.free) == BLOCKS


@pytest.mark.parametrize("who", "pd")
def test_what_a_dead_prefill_engine_had_sent_into_a_cut_hits_no_other(world, who):
    """Its kernel sends it again, ever more rarely, when the process and the cut are over."""
    hang(world)
    world.prefill()
    into = world.expect()
    world.run()
    world.cut(getattr(world, who), "bytes")
    world.run(seconds=WRITE / 2)
    world.p.die()
    world.run(seconds=ORPHANED / 2)
    assert "is gone" in failure(world)
    assert world.strays
    world.heal()
    world.run(seconds=STRAYS)
    assert world.strays == []
    assert world.d.bytes_of(into) == world.right_bytes("t", range(3))
    world.run(seconds=QUARANTINE[0] * QUARANTINE[1], step=QUARANTINE[0])

    assert len(world.d.free) == BLOCKS


def keep_blocks_behind_a_cut(world, silent_s, end, later_s, step=0.5):
    """Cut P off while it writes, and end the connection so much later: its blocks are kept for as long as TCP sends."""
    hang(world, hangs=False, clings=True)
    into = world.expect()
    world.run()
    world.cut(world.p, "both")
    world.prefill()
    world.run(seconds=silent_s)
    end()
    world.run(seconds=later_s, step=step)
    assert failure(world)
    assert_kept_until_healed(world, into, seconds=LONG_QUARANTINE[0] * LONG_QUARANTINE[1], step=5.0)


def test_a_prefill_engine_that_is_cut_off_may_write_much_later(world):
    """Its blocks are kept for longer than TCP sends again."""
    keep_blocks_behind_a_cut(world, LEASE, world.network.time_out, later_s=800, step=5.0)


def test_a_reset_connection_is_no_dead_prefill_engine(world):
    """P's kernel had given the connection up while the network was cut; P lives, and what it wrote is on its way."""
    keep_blocks_behind_a_cut(world, USER_TIMEOUT_MS / 1000, world.network.lose, later_s=200)


def test_a_prefill_engine_whose_connection_something_between_has_reset_may_write_on(world):
    """A firewall, or a proxy: the last answer is fresh, and what carries the KV cache is another connection."""
    hang(world, clings=True)
    world.prefill()
    into = world.expect()
    world.run()
    world.network.lose()
    world.run(seconds=200)
    assert failure(world)
    assert_kept_until_healed(world, into, seconds=LONG_QUARANTINE[0] * LONG_QUARANTINE[1], step=5.0)


@pytest.mark.parametrize("end", ["lose", "time_out"])
def test_a_prefill_engine_that_lives_says_when_the_blocks_are_free_again(world, end):
    """However long its workers hang: a clock cannot know, and nobody waits for one when nothing is written any more."""
    hang(world, clings=True)
    world.prefill()
    into = world.expect()
    world.run()
    world.cut(world.p, "control")
    getattr(world.network, end)()
    world.heal()
    hang(world, clings=True)
    world.expect("d-b", "u")  # D connects again
    world.run(seconds=2 * LONG_QUARANTINE[0] * LONG_QUARANTINE[1], step=5.0)
    assert failure(world)
    assert_kept_until_healed(world, into)


def test_a_decode_engine_that_was_suspended_takes_no_old_answer_for_a_new_one(world):
    """It reads P's answer together with the reset that came a minute later; P lives, and is cut off again."""
    hang(world, clings=True)
    world.prefill()
    into = world.expect()
    world.run()
    world.now += LEASE / 6
    world.d.turn(now=world.now)
    world.d.frozen = True
    world.round()
    world.round()
    assert HeartbeatReply() in [event.message for event in world.d.link.inbox]
    world.cut(world.p, "both")
    world.now += 60
    world.network.lose()
    world.d.frozen = False
    world.run(seconds=200)
    assert failure(world)
    assert_kept_until_healed(world, into, seconds=LONG_QUARANTINE[0] * LONG_QUARANTINE[1], step=5.0)


def test_blocks_of_a_prefill_engine_are_back_soon_after_a_reset_when_its_port_is_closed(world):
    """However long it was silent: a P that hangs and is killed for it must not cost its blocks for 18 minutes."""
    world.expect()
    world.run()
    world.p.frozen = True
    world.run(seconds=60)
    world.network.lose()
    world.p.die()
    world.run(seconds=QUARANTINE[0] * (QUARANTINE[1] + 2), step=QUARANTINE[0])

    assert len(world.d.free) == BLOCKS


def test_a_decode_engine_that_is_cut_off_recomputes(world):
    """P's lease ends meanwhile: what it wrote until then is not to be trusted."""
    into = world.expect()
    world.run()
    hang(world)
    world.prefill()
    world.run()
    world.cut(world.d, "control")
    world.run(seconds=LEASE + 1)
    world.heal()
    world.run(seconds=WRITE)

    assert failure(world)
    assert not set(into) & set(world.d.lent)


def test_a_dead_decode_engine_is_noticed_at_once(world):
    """And nothing is written any more."""
    world.expect()
    world.prefill()
    world.run()
    world.prefill("u", 3, chunk=1)
    world.expect("d-b", "u")
    world.run()
    world.d.die()
    world.run()
    world.prefill("u")
    world.run()

    assert why(world) == ["DONE", "DROPPED"]
    assert all(not writer._peers for writer in world.p.writers)


def test_another_prompts_kv_is_refused(world):
    """Whatever the router mixed up."""
    world.prefill()
    world.expect(prompt="another")
    world.run()

    assert "belongs to another prompt" in failure(world)


def test_two_requests_share_one_transfer(world):
    """One prompt, n answers."""
    first, second = world.expect(), world.expect("d-b")
    world.prefill()
    world.run()

    assert has_landed(world, first)
    assert has_landed(world, second, "d-b")
    assert why(world) == ["DONE"]


def test_a_second_answer_that_comes_late_is_right_or_recomputed_soon(world):
    """The first one's end has freed P's blocks: the second must not wait for a prefill that will never come."""
    world.expect()
    world.prefill()
    world.run()
    world.expect("d-b")
    world.run(seconds=LEASE)

    assert world.d.result("d-b") is not None


def test_an_unclaimed_transfer_leaves_nothing_behind(world):
    """The decode engine gave up first: the lease is over before the workers hear of the last blocks."""
    world.prefill(chunk=2)
    world.expect()
    world.run()
    world.stop()
    world.run()
    world.prefill()
    world.run(seconds=WAIT + 1)

    nothing_is_left(world.p)


def test_a_transfer_that_is_aborted_in_a_long_step_leaves_nothing_behind(world):
    """Pieces are told with the engine's steps, its end at once."""
    world.expect()
    world.run()
    world.prefill(chunk=2)
    world.p.is_busy = True
    world.prefill(chunk=0)
    world.p.abandon("t")
    world.run()
    world.p.is_busy = False
    world.run(seconds=WAIT + 1)

    nothing_is_left(world.p)


@pytest.mark.parametrize("is_aborted", [True, False], ids=["aborted", "handed over"])
def test_a_name_that_is_used_again_stands_for_the_new_prefill_only(world, is_aborted):
    """A client that tries again with the same id: the text must be made from the blocks of the second prefill."""
    world.prefill(chunk=2)
    world.expect()
    world.run()
    if is_aborted:
        world.stop()
        world.run()
    world.prefill()
    world.run()
    world.prefill("other", 2)
    into = world.expect("d-b")
    world.prefill()
    world.run(seconds=1)

    assert failure(world, "d-b") or has_landed(world, into, "d-b")


def test_the_end_of_a_name_does_not_hit_its_next_use(world):
    """P's engine is faster than its workers: both prefills' blocks, and the end of the first, lie in their queues."""
    world.prefill()
    world.expect()
    world.run()
    world.expect("d-b")
    world.p.is_busy = True
    world.prefill(chunk=1)
    world.prefill(chunk=1)
    world.p.abandon("t")
    world.prefill(chunk=2)
    world.p.is_busy = False
    world.prefill()
    into = world.expect("d-c")
    world.run(seconds=LEASE)

    assert world.d.result("d-c") is not None
    assert failure(world, "d-c") or has_landed(world, into, "d-c")


def test_a_worker_that_loses_its_scheduler_for_a_moment_writes_nothing_wrong(world):
    """It starts from nothing, and what came before is gone: the request recomputes."""
    into = world.expect(blocks=2)
    world.run()
    world.prefill(chunk=1)
    world.prefill(chunk=0)
    world.run()
    for wire in [wire for wire in world.network._wires if wire.is_local]:
        world.network._wires.remove(wire)
        for number, conn in wire.ends.items():
            link = world.network.links[number]
            link.inbox.append(ConnectionLost(conn, "closed"))
    world.run(seconds=1)
    world.prefill()
    world.run(seconds=LEASE)

    assert world.d.result("d-a") is None or failure(world) or has_landed(world, into)


def test_what_is_written_is_not_revoked(world):
    """The request would fail for it."""
    world.expect()
    world.run()
    world.p.movers[0].stuck = True
    world.prefill()
    world.run()
    world.p.revoke("t", now=world.now)
    world.p.movers[0].stuck = False
    world.run()

    assert world.d.result("d-a").failure == ""


def test_a_request_whose_transfer_is_over_hears_of_it(world):
    """It computes its own prompt, instead of registering in vain."""
    lost = []
    world.d.on_lost = lost.append
    world.prefill()
    world.p.revoke("t", now=world.now)
    world.run()
    world.start_renewing()
    world.run()

    assert lost == ["d-a"]


def test_a_quiet_connection_is_used_again(world):
    """An engine that nobody asked for an hour is no other one."""
    world.expect()
    world.prefill()
    world.run()
    world.run(seconds=3000, step=300)
    world.expect("d-b", "u")
    world.prefill("u")
    world.run()

    assert world.d.result("d-b") is not None


def test_a_thawed_engine_takes_in_what_was_sent_before_it_uses_the_blocks(world):
    """Time passed, and D looked at nothing."""
    hang(world)
    world.prefill()
    world.expect()
    world.run()
    world.p.die()
    world.round()
    world.now += 3600.0
    world.run(seconds=2)

    assert world.strays == []


def test_an_engine_that_was_suspended_does_not_trust_what_it_wrote(world):
    """Its lease was over when it went on."""
    world.expect()
    world.run()
    hang(world)
    world.prefill()
    world.run()
    hang(world, hangs=False)
    world.p.turn(now=world.now)
    world.now += LEASE
    world.run()

    assert "lease" in world.d.result("d-a").failure


def test_nobody_waits_for_what_is_over(world):
    """Its prefill will never come."""
    world.prefill()
    world.run(seconds=LEASE)
    world.expect()
    world.run()

    assert world.d.result("d-a") is not None
    assert "over" in world.d.result("d-a").failure


def test_every_rank_has_to_write():
    """A part of the KV is no KV."""
    world = PushWorld(ranks=2)
    into = world.expect()
    world.run()
    world.p.movers[1].stuck = True
    world.prefill()
    world.run()
    world.p.movers[1].stuck = False
    world.run()

    assert has_landed(world, into)


@pytest.mark.parametrize("ends", ["written", "aborted"])
def test_a_rank_that_has_written_does_not_write_again(ends):
    """Its scheduler has forgotten that connection, not its word: the last rank's makes the blocks another's."""
    world = PushWorld(ranks=2)
    into = world.expect()
    world.run()
    world.p.movers[1].stuck = True
    world.prefill()
    world.run()
    world.network.lose_scheduler(world.p.worker_links[0])
    world.p.movers[0].stuck = world.p.movers[0].clinging = True
    world.run(seconds=1)
    world.p.movers[1].stuck = False
    if ends == "aborted":
        world.stop("d-a")
    world.run(seconds=1)
    assert world.d.result("d-a") is not None
    hang(world, hangs=False)
    world.run(seconds=1)

    assert has_landed(world, into) or ends == "aborted"
    assert world.d.lent == {}


def test_what_one_engine_waits_for_no_other_can_refuse(world):
    """Whoever knows a transfer's name could have its prefill thrown away."""
    world.start_renewing()
    world.run()
    pushes = world.p.push_coordinator
    pushes.on(MessageReceived(STRANGER, DropLeases(("t",))), now=world.now)

    assert pushes._owner("t") not in (None, STRANGER)


PushMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPush = pytest.mark.slow(PushMachine.TestCase)  # any order of events: seconds


@each_mutant(
    mutants.free_without_waiting_for_stopped,
    mutants.ignore_one_rank,
)
def test_a_broken_rule_is_noticed(monkeypatch, mutate):
    """Each mutant is one rule of the design turned off; its name says which promise it breaks."""
    mutate(monkeypatch)

    with pytest.raises(NOTICED):
        search(PushMachine, 150)
