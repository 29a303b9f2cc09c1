"""The tests of push have teeth: each rule that is broken here on purpose must make one of them fail.

As in ``pull/test_pull_mutations.py``; the scenarios are those of ``push/test_push_pair.py``, as short as they can be.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.engines import BLOCKS, LEASE
from support.push_engines import PushWorld
from support.push_machine import STRANGER, PushMachine
from xpyd_connector.core.lease.prefill_scheduler import LeaseManager
from xpyd_connector.core.messages import DropLeases, PushStopped, StartPush
from xpyd_connector.core.ports import ConnectionLost
from xpyd_connector.core.push import decode_scheduler as push_receiver
from xpyd_connector.core.push.decode_scheduler import PushReceiver
from xpyd_connector.core.push.part_writer import PartWriter
from xpyd_connector.core.push.prefill_scheduler import PushCoordinator
from xpyd_connector.core.push.prefill_worker import PushWriter
from xpyd_connector.core.results import LoadResult
from xpyd_connector.core.session.peers import Peer
from xpyd_connector.errors import IllegalTransition

SEARCH = settings(
    max_examples=150, stateful_step_count=40, deadline=None, database=None, derandomize=True,
    phases=(Phase.generate,), report_multiple_bugs=False,
)  # fmt: skip


def what_is_written_is_not_revoked():
    world = PushWorld()
    world.expect()
    world.run()
    world.p.movers[0].stuck = True
    world.prefill()
    world.run()
    world.p.revoke("t", now=world.now)
    world.p.movers[0].stuck = False
    world.run()
    assert world.d.result("d-a").failure == ""


def what_one_engine_waits_for_no_other_can_refuse():
    world = PushWorld()
    world.start_renewing()
    world.run()
    owner = world.p.push_coordinator._owner("t")
    assert owner is not None
    world.p.push_coordinator._on_message(STRANGER, DropLeases(("t",)), world.now)
    assert world.p.push_coordinator._owner("t") == owner


def a_request_whose_transfer_is_over_hears_of_it():
    world = PushWorld()
    lost = []
    world.d.on_lost = lost.append
    world.prefill()
    world.p.revoke("t", now=world.now)
    world.run()
    world.start_renewing()
    world.run()
    assert lost == ["d-a"]


def an_idle_connection_that_ends_costs_no_request():
    world = PushWorld()
    world.expect()
    world.prefill()
    world.run()
    world.run(seconds=3600, step=300)
    into = world.expect("d-b", "u")
    (guest,) = world.p.push_coordinator._peers
    world.network.hang_up(world.p.link, guest)
    world.p.link.inbox.append(ConnectionLost(guest, "its engine sent no message"))
    world.prefill("u")
    world.run()
    assert world.d.result("d-b").failure == ""
    assert world.d.bytes_of(into) == world.right_bytes("u", range(len(into)))


def a_quiet_connection_is_used_again():
    world = PushWorld()
    world.expect()
    world.prefill()
    world.run()
    world.run(seconds=3000, step=300)
    world.expect("d-b", "u")
    world.prefill("u")
    world.run()
    assert world.d.result("d-b") is not None


def any_order_of_events():
    run_state_machine_as_test(PushMachine, settings=SEARCH)


def hang(world, *, hangs=True, clings=False):
    for mover in world.p.movers:
        mover.stuck, mover.clinging = hangs, clings


def check(world, into, request="d-a"):
    assert world.d.result(request).failure == ""
    assert world.d.bytes_of(into) == world.right_bytes("t", range(len(into)))


def a_preempted_prefill_is_written_anew():
    world = PushWorld()
    into = world.expect()
    world.run()
    world.prefill(chunk=3)
    world.prefill(chunk=0)
    world.run()
    world.p.preempt("t")
    world.prefill("other", 3)
    world.run()
    world.prefill()
    world.run()
    check(world, into)


def a_slow_first_attempt_does_not_overtake_the_second():
    world = PushWorld()
    into = world.expect()
    world.run()
    hang(world)
    world.prefill(chunk=3)
    world.prefill(chunk=0)
    world.run()
    world.p.preempt("t")
    world.prefill()
    world.run()
    flights = world.p.movers[0]._xfers
    flights.update({number: flights.pop(number) for number in list(flights)[:1]})  # the oldest one arrives last
    hang(world, hangs=False)
    world.run()
    check(world, into)


def blocks_wait_until_p_has_stopped():
    world = PushWorld()
    hang(world, clings=True)
    world.prefill()
    world.expect()
    world.run()
    world.stop()
    world.run()
    assert len(world.d.free) < BLOCKS
    world.heal()
    world.run()
    assert len(world.d.free) == BLOCKS


def what_a_dead_engine_sent_hits_nobody():
    world = PushWorld()
    hang(world)
    world.prefill()
    world.expect()
    world.run()
    world.p.die()
    world.run(seconds=2)
    assert world.strays == []


def what_a_cut_engine_sends_much_later_hits_nobody():
    world = PushWorld()
    world.expect()
    world.run()
    hang(world, hangs=False, clings=True)
    world.cut(world.p, "both")
    world.prefill()
    world.run()
    world.network.time_out()
    world.run(seconds=800, step=5.0)
    world.heal()
    world.run()


def a_thawed_engine_takes_in_what_was_sent_before_it_uses_the_blocks():
    world = PushWorld()
    hang(world)
    world.prefill()
    world.expect()
    world.run()
    world.p.die()
    world.round()
    world.now += 3600.0
    world.run(seconds=2)
    assert world.strays == []


def an_engine_that_was_suspended_does_not_trust_what_it_wrote():
    world = PushWorld()
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


def nobody_waits_for_what_is_over():
    world = PushWorld()
    world.prefill()
    world.run(seconds=LEASE)
    world.expect()
    world.run()
    assert world.d.result("d-a") is not None
    assert "over" in world.d.result("d-a").failure


def every_rank_has_to_write():
    world = PushWorld(ranks=2)
    into = world.expect()
    world.run()
    world.p.movers[1].stuck = True
    world.prefill()
    world.run()
    world.p.movers[1].stuck = False
    world.run()
    check(world, into)


def another_prompt_is_refused():
    world = PushWorld()
    world.prefill()
    world.expect(prompt="another")
    world.run()
    assert world.d.result("d-a").failure


def what_nobody_wants_is_freed_when_it_is_computed():
    world = PushWorld()
    world.expect()
    world.run()
    world.stop()
    world.run()
    world.prefill()
    world.run()
    assert [released.why.name for released in world.p.freed] == ["DROPPED"]


def a_hung_engine_is_noticed():
    world = PushWorld()
    world.expect()
    world.run()
    world.p.frozen = True
    world.run(seconds=LEASE)
    assert world.d.result("d-a") is not None


def a_decode_engine_that_leaves_is_not_written_to():
    world = PushWorld()
    world.expect()
    world.run()
    world.network.lose()
    world.run(seconds=60)
    assert len(world.d.free) == BLOCKS
    world.prefill(chunk=2)
    world.prefill(chunk=0)
    world.run()


def every_rank_there_is_written_to():
    world = PushWorld(ranks=1, d_ranks=2)
    into = world.expect()
    world.prefill()
    world.run()
    check(world, into)


def complete_before_the_source_is(patch):
    accept = PushWriter._accept

    def hasty(self, piece, now):
        accept(self, piece, now)
        source = self._sources[piece.request]
        for writing in list(self._by_request.get(piece.request, ())):
            source.complete = source.complete or source.tokens >= writing.order.groups[0].stop

    patch.setattr(PushWriter, "_accept", hasty)


def do_not_wait_for_the_old_attempts_flights(patch):
    pump = PushWriter._write_computed

    def hasty(self, writing, now):
        source = self._sources.get(writing.order.request)
        if source is not None and writing.attempt != source.attempt:
            writing.attempt, writing.sent = source.attempt, 0
        pump(self, writing, now)

    patch.setattr(PushWriter, "_write_computed", hasty)


def free_without_waiting_for_stopped(patch):
    give_up = PushReceiver._abort

    def hasty(self, *args):
        give_up(self, *args)
        self._results = [
            each._replace(quarantined=False) if isinstance(each, LoadResult) else each for each in self._results
        ]

    patch.setattr(PushReceiver, "_abort", hasty)


def no_quarantine(patch):
    patch.setattr(push_receiver, "QUARANTINE", (0.0, 1))
    patch.setattr(push_receiver, "LONG_QUARANTINE", (0.0, 1))


def take_silence_for_death(patch):
    patch.setattr(push_receiver, "LONG_QUARANTINE", push_receiver.QUARANTINE)


def count_time_instead_of_looks(patch):
    lose, until = PushReceiver._on_peer_lost, {}

    def note(self, landing, peer, now):
        lose(self, landing, peer, now)
        until[landing.order.request] = now + landing.check_interval * landing.checks

    def look(self, landing, now):
        if now >= until[landing.order.request]:
            self._release(landing)
        else:
            self._deadlines.set(landing.order.request, now + landing.check_interval)

    patch.setattr(PushReceiver, "_on_peer_lost", note)
    patch.setattr(PushReceiver, "_check_quarantine", look)


def land_without_asking_for_the_lease(patch):
    patch.setattr(LeaseManager, "holds", lambda self, request: True)


def forget_what_is_over(patch):
    patch.setattr(PushCoordinator, "released", lambda self, ended, *, now: None)


def ignore_one_rank(patch):
    register = PushCoordinator._register

    def forgetful(self, conn, order, now):
        register(self, conn, order, now)
        for push in self._by_request.get(order.request, {}).values():
            push.writing_ranks.discard(1)

    patch.setattr(PushCoordinator, "_register", forgetful)


def answer_stop_before_the_workers_have(patch):
    stop = PushCoordinator._stop_for

    def hasty(self, conn, readers):
        stop(self, conn, readers)
        for reader in readers:
            self._link.send(conn, PushStopped(reader, ""))

    patch.setattr(PushCoordinator, "_stop_for", hasty)


def write_whatever_prompt(patch):
    objection = PushWriter._objection

    def trusting(self, writing, source):
        source.prompt = writing.order.prompt
        return objection(self, writing, source)

    patch.setattr(PushWriter, "_objection", trusting)


def forget_who_spoke_early(patch):
    patch.setattr(PushCoordinator, "_note_interest", lambda self, requests, conn, now, *, wants=True: [])


def trust_a_silent_peer(patch):
    patch.setattr(PushReceiver, "_abort_all_of", lambda self, peer: None)


def keep_writing_to_who_left(patch):
    told = PushWriter._on_message
    patch.setattr(
        PushWriter, "_on_message", lambda self, message, now: told(self, message, now) if hasattr(message, "reader") or
        isinstance(message, StartPush) or not hasattr(message, "peer") or hasattr(message, "rank") else None,
    )  # fmt: skip


def write_to_one_rank_only(patch):
    """Take the first rank of a decode engine for the whole."""
    send = PartWriter.write
    patch.setattr(
        PartWriter,
        "write",
        lambda self, remote_ranks, token_ranges, *, now: send(self, remote_ranks[:1], token_ranges, now=now),
    )


def revoke_what_is_written(patch):
    patch.setattr(PushCoordinator, "is_writing", lambda self, request: False)


def say_nothing_of_what_is_over(patch):
    patch.setattr(LeaseManager, "send_leases_lost", lambda self, conn, lost: None)


def let_anybody_have_a_transfer(patch):
    patch.setattr(PushCoordinator, "_is_foreign", lambda self, request, conn: False)


def register_over_any_connection(patch):
    patch.setattr(Peer, "is_idle", lambda self, *, now: False)


def wait_for_an_answer_that_was_given(patch):
    patch.setattr(PushReceiver, "_on_heartbeat_reply", lambda self, conn: None)


MUTANTS = [
    (register_over_any_connection, an_idle_connection_that_ends_costs_no_request),
    (wait_for_an_answer_that_was_given, a_quiet_connection_is_used_again),
    (revoke_what_is_written, what_is_written_is_not_revoked),
    (say_nothing_of_what_is_over, a_request_whose_transfer_is_over_hears_of_it),
    (let_anybody_have_a_transfer, what_one_engine_waits_for_no_other_can_refuse),
    (complete_before_the_source_is, a_preempted_prefill_is_written_anew),
    (do_not_wait_for_the_old_attempts_flights, a_slow_first_attempt_does_not_overtake_the_second),
    (free_without_waiting_for_stopped, blocks_wait_until_p_has_stopped),
    (answer_stop_before_the_workers_have, blocks_wait_until_p_has_stopped),
    (no_quarantine, what_a_dead_engine_sent_hits_nobody),
    (take_silence_for_death, what_a_cut_engine_sends_much_later_hits_nobody),
    (count_time_instead_of_looks, a_thawed_engine_takes_in_what_was_sent_before_it_uses_the_blocks),
    (land_without_asking_for_the_lease, an_engine_that_was_suspended_does_not_trust_what_it_wrote),
    (forget_what_is_over, nobody_waits_for_what_is_over),
    (ignore_one_rank, every_rank_has_to_write),
    (write_whatever_prompt, another_prompt_is_refused),
    (forget_who_spoke_early, what_nobody_wants_is_freed_when_it_is_computed),
    (trust_a_silent_peer, a_hung_engine_is_noticed),
    (keep_writing_to_who_left, a_decode_engine_that_leaves_is_not_written_to),
    (free_without_waiting_for_stopped, any_order_of_events),
    (ignore_one_rank, any_order_of_events),
    (write_to_one_rank_only, every_rank_there_is_written_to),
]
SCENARIOS = list(dict.fromkeys(scenario for _, scenario in MUTANTS if scenario is not any_order_of_events))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenarios_hold_as_long_as_no_rule_is_broken(scenario):
    """Otherwise their failures below would mean nothing; ``test_push_properties.py`` shows it for the machine."""
    scenario()


@pytest.mark.parametrize(("mutate", "scenario"), MUTANTS, ids=lambda part: part.__name__)
def test_a_broken_rule_is_noticed(monkeypatch, mutate, scenario):
    """The name of the mutant says which promise it breaks."""
    mutate(monkeypatch)

    with pytest.raises((AssertionError, IllegalTransition, KeyError)):
        scenario()
