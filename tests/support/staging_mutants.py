"""Rules of staging, each turned off, as in ``support.pull_mutants``; see ``staging/test_prefill_scheduler.py``."""

from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
from pdrelay_connector.core.staging.prefill_scheduler import StagingCoordinator
from pdrelay_connector.core.staging.slots import Slots


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
        slots = self._granted.get(ticket)
        give_back(self, ticket)
        if slots is not None and slots[0]:
            self._free[0].append(slots[0][0])

    patch.setattr(Slots, "release", generous)


def believe_anybody_who_says_that_a_rank_has_read(patch):
    def has_read(self, conn, key, rank):
        self._drop_rank(key, rank, "somebody said so")

    patch.setattr(StagingCoordinator, "_on_read_done", has_read)
