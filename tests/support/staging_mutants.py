"""Rules of staging, each turned off, as in ``support.pull_mutants``; see ``staging/test_prefill_scheduler.py``."""

from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.staging.prefill_scheduler import StagingCoordinator
from pdrelay_connector.core.staging.slots import Slots


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


def take_slots_from_the_slower_rank(patch):
    def go_on(self, part, rank):
        part.ranks.pop(rank, None)
        if part.state.name == "STAGED":
            self._end(part, "")

    patch.setattr(StagingCoordinator, "_part_read", go_on)


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
        slots = self._granted.get(ticket)
        give_back(self, ticket)
        if slots is not None and slots[0]:
            self._free[0].append(slots[0][0])

    patch.setattr(Slots, "release", generous)
