"""A prefill engine that takes checksums and a decode engine that compares them: the stories of both modes."""

import pytest

from pdrelay_connector.core.lease.lease_table import LeaseEvent
from support.engines import EVERYTHING, LEASE, TIMEOUT, World
from support.push_engines import PushWorld

MODES = ["pull", "push"]


class Story:
    """One transfer of three blocks, ``a``, in either mode; ``spoilt`` blocks of it arrive as something else."""

    def __init__(self, mode, *, ranks=1, d_ranks=None, spoilt=()):
        self.mode, self.spoilt, self.into = mode, set(spoilt), None
        d_ranks = d_ranks or ranks
        if mode == "pull":
            options = {"p": {"ranks": ranks, "sampling": EVERYTHING}, "d": {"ranks": d_ranks, "heads": ranks}}
            self.world = World(**options)
            movers = [self.world.d.mover]
        else:
            self.world = PushWorld(ranks=ranks, d_ranks=d_ranks, heads=ranks, sampling=EVERYTHING)
            movers = self.world.p.movers
        for mover in movers:
            mover._copy = self._spoiling(mover, mover._copy)

    def _spoiling(self, mover, copy):
        def spoil(flight):
            copy(flight)
            d = self.world.d
            place = [self.into[number] for number in self.spoilt] if self.into else []
            for block in place:
                d.memories[-1][block * d.pieces] = b"spoilt"

        return spoil

    def begin(self, request="a"):
        if self.mode == "pull":
            self.into = self.world.load(self.world.lend(request), request)
        else:
            self.into = self.world.expect(f"d-{request}", f"t-{request}")
            self.world.prefill(f"t-{request}")

    def run(self, **options):
        self.world.run(**options)
        return self

    @property
    def failure(self):
        result = self.world.d.result("d-a")
        return None if result is None else result.failure

    def counts(self):
        d = self.world.d
        return d.worker_tally.take_report().counters | d.counters.take_report().counters


@pytest.mark.parametrize(("mode", "ranks"), [("pull", 1), ("push", 1), ("push", 2)])
def test_right_blocks_are_compared_and_used(mode, ranks):
    """The main path costs no time."""
    story = Story(mode, ranks=ranks)
    story.begin()
    story.run()

    assert story.failure == ""
    counts = story.counts()
    assert counts["blocks_checked"] == 3 * ranks
    assert not {"blocks_wrong", "loads_unchecked"} & counts.keys()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spoilt", [{0}, {2}, {0, 1, 2}], ids=str)
def test_a_load_with_a_wrong_block_fails(mode, spoilt):
    """Its prompt is computed again, and its blocks hold nothing that another request may find."""
    story = Story(mode, spoilt=spoilt)
    story.begin()
    story.run()

    assert f"{len(spoilt)} of 3 sampled blocks" in story.failure
    assert not story.world.d.result("d-a").quarantined
    assert story.counts()["blocks_wrong"] == len(spoilt)
    assert not story.world.d.into


def test_a_wrong_block_of_the_second_rank_fails_the_load():
    """Each rank compares its own heads with those of the rank that has written them."""
    story = Story("push", ranks=2, spoilt={1})
    story.begin()
    story.run()

    assert "1 of 3 sampled blocks" in story.failure


def test_engines_of_unequal_shapes_compare_nothing_and_say_so():
    """The same KV is other bytes in another shape."""
    story = Story("push", ranks=2, d_ranks=1)
    story.begin()
    story.run()

    assert story.failure == ""
    assert story.counts()["loads_unchecked"] == 1


def test_a_busy_prefill_engine_keeps_its_blocks_and_the_reader_waiting():
    """The checksums come with the next step. Until then D must not use what it has read, nor P free the blocks."""
    story = Story("pull", spoilt={1})
    story.world.p.is_busy = True
    story.begin()
    story.run()
    assert story.failure is None
    assert story.world.p.freed == []
    story.world.p.is_busy = False
    story.run()

    assert "1 of 3 sampled blocks" in story.failure
    assert [released.reason for released in story.world.p.freed] == [LeaseEvent.DONE]


def test_a_lease_that_ends_before_its_checksums_are_there_has_not_held():
    """The blocks may be another prompt's by then. The reader is told so at once."""
    story = Story("pull")
    story.world.p.is_busy = True
    story.begin()
    story.run()
    story.world.p.control.abandon(("p-a",))
    story.run()

    assert "lease" in story.failure
    assert [released.reason for released in story.world.p.freed] == [LeaseEvent.DROPPED]


def test_a_prefill_engine_whose_step_takes_too_long_is_not_taken_for_hung():
    """Its peer would fail all that it loads from there. The load is answered without checksums, and late ones go."""
    story = Story("pull", spoilt={1})
    p = story.world.p
    p.is_busy = True
    story.begin()
    story.run(seconds=TIMEOUT + 1)
    assert story.failure == ""
    assert [released.reason for released in p.freed] == [LeaseEvent.DONE]
    p.is_busy = False
    story.run()

    assert not {"peers_lost", "blocks_checked", "loads_failed_timeout"} & story.counts().keys()
    assert p.counters.take_report().counters["sums_late"] == 1
    assert p.control.lease_manager._sampled == {}


@pytest.mark.parametrize("end", ["read", "expired", "cut off while it waits"])
def test_nothing_is_kept_of_a_lease_that_is_over(end):
    """One entry for each sampled prefill would fill the memory."""
    story = Story("pull")
    p = story.world.p
    if end == "expired":
        story.world.lend()
        story.run(seconds=LEASE + 1)
    elif end == "read":
        story.begin()
        story.run()
    else:
        p.is_busy = True
        story.begin()
        story.run()
        story.world.d.die()
        story.run()
        p.is_busy = False
        story.run()

    assert p.control.lease_manager._sampled == {}
    assert len(p.freed) == 1
