"""Rules of staging, each broken on purpose: a machine that notices none of it would test nothing."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.staging_machine import StagingMachine
from support.staging_world import StagingWorld
from xpyd_connector.core.lease.prefill_scheduler import LeaseManager
from xpyd_connector.core.messages import DropLeases, ReadDone
from xpyd_connector.core.staging.prefill_scheduler import StagingCoordinator
from xpyd_connector.core.staging.slots import Slots
from xpyd_connector.errors import IllegalTransition


def free_while_copies_run(patch):
    end = StagingCoordinator._end

    def hasty(self, part, why):
        if part.copying:
            self._slots.release(part.number)
        end(self, part, why)

    patch.setattr(StagingCoordinator, "_end", hasty)


def forget_copies_that_run(patch):
    end = StagingCoordinator._end

    def hasty(self, part, why):
        part.copying.clear()
        end(self, part, why)

    patch.setattr(StagingCoordinator, "_end", hasty)


def keep_slots_after_the_lease(patch):
    patch.setattr(StagingCoordinator, "released", lambda self, ended: None)


def stage_without_a_lease(patch):
    patch.setattr(LeaseManager, "holds", lambda self, request: True)


def do_not_wait_for_the_slower_worker(patch):
    copied = StagingCoordinator._copied

    def hasty(self, number, worker, reason, now):
        if number in self._parts and not reason:
            self._parts[number].copying = {worker} & self._parts[number].copying
        copied(self, number, worker, reason, now)

    patch.setattr(StagingCoordinator, "_copied", hasty)


def take_slots_from_the_slower_rank(patch):
    def go_on(self, part, rank):
        part.ranks.pop(rank, None)
        if part.state.name == "STAGED":
            self._end(part, "")

    patch.setattr(StagingCoordinator, "_part_read", go_on)


def take_slots_from_all_when_one_is_lost(patch):
    leave = StagingCoordinator._drop_rank

    def hasty(self, key, rank, why):
        leave(self, key, rank, why)
        if (reading := self._reads.get(key)) is not None and "lost" in why:
            for part in list(reading.parts.values()):
                self._end(part, why)

    patch.setattr(StagingCoordinator, "_drop_rank", hasty)


def do_not_tell_a_worker_that_is_back(patch):
    patch.setattr(StagingCoordinator, "_resend_copies", lambda self, rank: None)


def answer_nobody_when_it_ends(patch):
    end = StagingCoordinator._end

    def mute(self, part, why):
        part.ranks.clear()
        end(self, part, why)

    patch.setattr(StagingCoordinator, "_end", mute)


def hand_out_slots_twice(patch):
    give_back = Slots.release

    def generous(self, ticket):
        slots = self._held.get(ticket)
        give_back(self, ticket)
        if slots is not None and slots[0]:
            self._free[0].append(slots[0][0])

    patch.setattr(Slots, "release", generous)


def any_order_of_events():
    thorough = settings(
        max_examples=500, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(StagingMachine, settings=thorough)


def a_lost_rank_costs_the_others_nothing():
    world = StagingWorld(decoders=[2])
    _, other = world.load(world.p.lend(4), size=4)
    world.run()
    world.decoders[0].workers[0].hang_up()
    world.run()
    world.load(world.p.lend(4), size=4, ranks=[1])
    assert world.p.slots.held == 4, "slots were taken from a rank that reads"
    assert other.state == "reading"


def a_part_is_read_when_every_worker_has_copied_it():
    world = StagingWorld(ranks=2)
    world.p.copiers[1].stuck = True
    (load,) = world.load(world.p.lend(2), size=2)
    world.run()
    world.go_on()
    world.p.copiers[1].stuck = False
    world.run()
    world.go_on()
    assert (load.state, load.right) == ("done", True)


def slots_wait_for_the_copy_into_them():
    world = StagingWorld()
    world.p.copiers[0].stuck = True
    request = world.p.lend(4)
    world.load(request, size=4)
    world.run()
    world.decoders[0].say(DropLeases, request)
    world.run()
    assert world.p.slots.held == 4, "slots were free while a copy into them was under way"


def believe_anybody_who_says_that_a_rank_has_read(patch):
    def has_read(self, conn, key, rank):
        self._drop_rank(key, rank, "somebody said so")

    patch.setattr(StagingCoordinator, "_on_read_done", has_read)


def a_rank_reads_until_it_says_otherwise():
    world = StagingWorld(decoders=[1, 1])
    load = world.load(world.p.lend(2), size=2)[0]
    world.run()
    other = world.decoders[1]
    other.link.send(other.conn, ReadDone(load.request, load.reader, 0, 2))
    world.run()
    assert world.p.staging_coordinator.is_reading(load.request)


MUTANTS = [
    (believe_anybody_who_says_that_a_rank_has_read, a_rank_reads_until_it_says_otherwise),
    (free_while_copies_run, slots_wait_for_the_copy_into_them),
    (forget_copies_that_run, slots_wait_for_the_copy_into_them),
    (do_not_wait_for_the_slower_worker, a_part_is_read_when_every_worker_has_copied_it),
    (take_slots_from_all_when_one_is_lost, a_lost_rank_costs_the_others_nothing),
    (take_slots_from_the_slower_rank, any_order_of_events),
    (forget_copies_that_run, any_order_of_events),
    (keep_slots_after_the_lease, any_order_of_events),
    (stage_without_a_lease, any_order_of_events),
    (do_not_tell_a_worker_that_is_back, any_order_of_events),
    (answer_nobody_when_it_ends, any_order_of_events),
    (hand_out_slots_twice, any_order_of_events),
]
SCENARIOS = list(dict.fromkeys(scenario for _, scenario in MUTANTS if scenario is not any_order_of_events))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenarios_hold_as_long_as_no_rule_is_broken(scenario):
    """Otherwise their failures below would mean nothing; ``test_staging_properties.py`` shows it for the machine."""
    scenario()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mutate", "scenario"), MUTANTS, ids=lambda part: part.__name__)
def test_a_broken_rule_is_noticed(monkeypatch, mutate, scenario):
    """The name of the mutant says which promise it breaks."""
    mutate(monkeypatch)

    with pytest.raises((AssertionError, IllegalTransition, KeyError, ExceptionGroup)):
        scenario()
