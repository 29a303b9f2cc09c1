"""P's scheduler between decode engines that read staged KV and its own workers: who has slots, and until when."""

import pytest
from hypothesis import settings

from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.core.messages import Challenge, DropLeases, ReadDone, RenewLeases, StagePart, WorkerHello
from pdrelay_connector.core.staging import prefill_scheduler
from support import staging_mutants as mutants
from support.mutation import NOTICED, each_mutant, search
from support.searching import examples
from support.staging_machine import StagingMachine
from support.staging_world import BLOCKS, LEASE, PATIENCE, SLOTS, StagingWorld


def states(world):
    return sorted(part.state.name for part in world.p.staging_coordinator._parts.values())


def is_empty(world):
    return len(world.p.staging_coordinator) == world.p.slots.granted == 0


def renew(world, request, decoder=0):
    world.decoders[decoder].say(RenewLeases, request)
    world.run()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_request_is_read_part_by_part(ranks, readers, groups):
    """Every rank of D gets the right bytes of every rank of P, and the lease is done when the last has them."""
    world = StagingWorld(ranks=ranks, groups=groups, decoders=[readers])
    request = world.p.lend(5)
    loads = world.load(request, size=2)
    world.run()
    parts = 0
    while world.read_started():
        assert world.p.slots.granted <= 2 * groups, "a part was kept when everybody had gone on"
        world.go_on()
        parts += 1

    assert parts == 3
    assert [(load.state, load.right) for load in loads] == [("done", True)] * readers
    assert (world.p.held, is_empty(world)) == ({}, True)
    assert world.p.worker_tally.take_report().counters == {"bytes_staged_out": 5 * groups * ranks * 64}


def test_a_rank_that_never_asks_fails_the_others_in_time():
    """It has failed alone: they would wait as long as the lease is renewed."""
    world = StagingWorld(decoders=[2])
    request = world.p.lend(2)
    (load,) = world.load(request, size=2, ranks=[0])
    for _ in range(5):
        renew(world, request)
        world.run(PATIENCE / 5, step=5.0)

    assert (load.state, load.reason) == ("failed", "only 1 of 2 ranks asked for it in time")
    assert request in world.p.held


def test_requests_wait_for_room_first_come_first_served():
    """Of all decode engines."""
    world = StagingWorld(decoders=[1, 1])
    loads = []
    for decoder in (0, 1, 0):
        loads += world.load(world.p.lend(3), size=3, decoder=decoder)
        world.run()
    first, second, third = loads
    seen = [(first.state, second.state, third.state)]
    for _ in range(3):
        world.go_on()
        seen.append((first.state, second.state, third.state))

    assert seen == [
        ("reading", "asking", "asking"),
        ("done", "reading", "asking"),
        ("done", "done", "reading"),
        ("done", "done", "done"),
    ]


@pytest.mark.parametrize("how", ["dropped", "expired", "connection lost"])
def test_slots_are_taken_back_when_the_lease_ends_and_the_fence_tells(how):
    """Whoever reads on reads another's bytes, and hears that they do not count."""
    world = StagingWorld(decoders=[1, 1])
    request = world.p.lend(SLOTS)
    (load,) = world.load(request, size=SLOTS)
    renew(world, request)
    match how:
        case "dropped":
            world.decoders[0].say(DropLeases, request)
        case "expired":
            world.run(LEASE, step=LEASE)
        case _:
            world.decoders[0].link.close(world.decoders[0].conn)
    world.run()
    assert is_empty(world)
    world.load(world.p.lend(SLOTS), size=SLOTS, decoder=1)
    world.run()
    world.go_on()

    assert (load.right, load.state) == (False, "failed")


def test_slots_are_free_only_when_the_copy_into_them_has_ended():
    """It would write one request's KV into another's slots."""
    world = StagingWorld()
    copier = world.p.copiers[0]
    copier.stuck = True
    request = world.p.lend(SLOTS)
    world.load(request, size=SLOTS)
    world.run()
    world.decoders[0].say(DropLeases, request)
    world.run()
    assert states(world) == ["ENDING"]
    (other,) = world.load(world.p.lend(SLOTS), size=SLOTS)
    world.run()
    assert states(world) == ["ENDING", "WAITING"]
    copier.stuck = False
    world.run()

    assert (states(world), other.right) == (["STAGED"], True)


def test_a_worker_that_was_away_copies_what_it_missed():
    """Whether it had not heard of it or was not heard: the slots are kept until it has said that it is done."""
    world = StagingWorld(ranks=2)
    world.p.lose_worker(1)
    world.p.copiers[0].stuck = True
    (load,) = world.load(world.p.lend(2), size=2)
    world.round()
    world.p.lose_worker(0)
    world.run()
    assert states(world) == ["COPYING"]
    world.p.copiers[0].stuck = False
    world.run(1.0)
    world.go_on()

    assert (load.state, load.right) == ("done", True)


def test_what_cannot_be_copied_is_not_staged():
    """The decode engine hears why, and the slots come back when the other ranks have ended."""
    world = StagingWorld(ranks=2)
    world.p.copiers[0].failure, world.p.copiers[1].stuck = "no such device", True
    (load,) = world.load(world.p.lend(2), size=2)
    world.run()
    assert (load.state, load.reason) == ("failed", "rank 0 could not copy it: no such device")
    assert states(world) == ["ENDING"]
    world.p.copiers[1].stuck = False
    world.run()

    assert world.p.slots.granted == 0


def test_a_rank_that_is_lost_does_not_cost_the_others_what_they_read():
    """Their fence would say that the lease held, and it does: so their slots must hold, too."""
    world = StagingWorld(decoders=[2])
    request = world.p.lend(4)
    _, other = world.load(request, size=2)
    renew(world, request)
    world.decoders[0].workers[0].hang_up()
    world.run()
    assert states(world) == ["STAGED"]
    world.decoders[0].workers[1].go_on(other)
    world.run()

    assert other.right
    assert (other.state, other.reason) == ("failed", "the connection of its rank 0 is lost")
    assert is_empty(world)


def test_a_decode_engine_that_stalls_does_not_keep_the_buffer_from_others():
    """Its scheduler may renew for ever while a worker hangs: the lease ends, so that the fence tells."""
    world = StagingWorld()
    request = world.p.lend(2)
    (load,) = world.load(request, size=2)
    for _ in range(8):
        renew(world, request)
        world.run(PATIENCE / 8, step=5.0)
    assert is_empty(world)
    world.go_on()

    assert (load.state, world.p.held) == ("failed", {})


def stage(world, request, *, conn=None, **changes):
    """Ask as no decode engine of ours would; return why it was refused."""
    worker = world.decoders[0].workers[0]
    fields = {"reader": "d-x", "rank": 0, "ranks": 1, "part": 0, "groups": ((1,),), **changes}
    worker.link.send(conn or worker.conn, StagePart(request, RequestId(fields.pop("reader")), **fields))
    world.network.deliver()
    world.p.turn(now=world.now)
    world.network.deliver()
    said = [event.message for event in worker.link.poll() if hasattr(event, "message")]
    return "; ".join(message.reason for message in said if hasattr(message, "reason"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"groups": ((0,),)}, f"block 0 is asked for; there are 1 to {BLOCKS - 1}"),
        ({"groups": ((BlockId(BLOCKS),),)}, f"block {BLOCKS} is asked for"),
        ({"groups": ((1,), (2,))}, "slots of 2 KV cache groups are wanted"),
        ({"groups": (tuple(range(1, SLOTS + 2)),)}, f"{SLOTS + 1} slots of KV cache group 0 are wanted"),
        ({"rank": 1}, "rank 1 of 1 asks"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_refused_with_the_reason(changes, reason):
    """Nothing of it reaches a device."""
    world = StagingWorld()

    assert reason in stage(world, world.p.lend(2), **changes)
    assert is_empty(world)


@pytest.mark.parametrize(
    ("before", "then", "reason"),
    [
        ({"ranks": 2}, {"ranks": 2}, "rank 0 asks for part 0; it has asked for part 0 before"),
        ({"ranks": 2}, {"ranks": 2, "part": 1}, "rank 0 asks for part 1; it has asked for part 0 before"),
        ({"ranks": 2}, {"ranks": 2, "rank": 1, "groups": ((2,),)}, "another rank has asked for other blocks"),
        ({"ranks": 2}, {"ranks": 3, "rank": 1}, "another rank has asked for other blocks"),
        ({"part": 1}, {"part": 0}, "rank 0 asks for part 0; it has asked for part 1 before"),
    ],
)
def test_a_decode_engine_that_contradicts_itself_is_refused(before, then, reason):
    """One answer for every question, also for those."""
    world = StagingWorld()
    request = world.p.lend(2)
    stage(world, request, **before)

    assert reason in stage(world, request, **then)


def test_a_rank_that_has_gone_on_may_not_come_back():
    """Its slots may be another's by the time the others go on."""
    world = StagingWorld(decoders=[2])
    fast, _ = world.load(world.p.lend(4), size=2)
    world.run()
    world.decoders[0].workers[0].go_on(fast)
    world.run()
    groups = tuple(tuple(ids) for ids in fast.parts[0][0])
    world.p.staging_coordinator._reads[fast.request, fast.reader].parts[1].ranks.clear()
    said = stage(world, fast.request, reader=fast.reader, ranks=2, groups=groups)

    assert "rank 0 has gone on from part 0 before" in said


def test_a_rank_speaks_over_one_connection():
    """Two of them would get one answer."""
    world = StagingWorld(decoders=[1, 1])
    request = world.p.lend(2)
    stage(world, request, ranks=2)
    other = world.decoders[1].workers[0]
    other.asked.add(("d-x", 0))
    other.loads["d-x"] = world.load(world.p.lend(1), size=1)[0]
    other.link.send(other.conn, StagePart(request, RequestId("d-x"), 0, 2, 0, ((1,),)))
    world.network.deliver()
    world.p.turn(now=world.now)
    world.network.deliver()
    (said,) = [event.message for event in other.link.poll()]

    assert said.reason == "rank 0 asks over a second connection"


def test_only_a_ranks_own_connection_says_that_it_has_read():
    """Another's word would give its slots away while it reads, and its own fence would call right what it got."""
    world = StagingWorld(decoders=[1, 1])
    load = world.load(world.p.lend(2), size=2)[0]
    world.run()
    assert states(world) == ["STAGED"]
    other = world.decoders[1]
    other.link.send(other.conn, ReadDone(load.request, load.reader, 0, 2))
    world.run()

    assert states(world) == ["STAGED"]
    assert world.p.counters.take_report().counters["foreign_messages"] == 1


def test_a_part_of_anothers_lease_is_not_staged():
    """A stranger that knows the request's name would read its KV."""
    world = StagingWorld(decoders=[1, 1])
    request = world.p.lend(2)
    renew(world, request, decoder=1)

    assert stage(world, request) == f"the lease of request {request} is another decode engine's"
    assert is_empty(world)


def test_what_is_read_part_by_part_is_not_revoked():
    """The control thread asks before it revokes."""
    world = StagingWorld()
    load = world.load(world.p.lend(2), size=2)[0]
    assert not world.p.staging_coordinator.is_reading(load.request)
    world.run()
    assert world.p.staging_coordinator.is_reading(load.request)
    world.go_on()

    assert not world.p.staging_coordinator.is_reading(load.request)


def test_there_is_an_end_to_what_is_remembered(monkeypatch):
    """A decode engine may name as many requests as it likes."""
    monkeypatch.setattr(prefill_scheduler, "MAX_PARTS", 1)
    world = StagingWorld()
    request = world.p.lend(2)
    stage(world, request, ranks=2)

    assert stage(world, request, reader="d-y") == "1 parts are asked for"


@pytest.mark.parametrize(
    "message", [Challenge(4, b"x"), WorkerHello(0, b"a guess"), WorkerHello(7, b"token 0")], ids=repr
)
def test_an_unexpected_message_closes_the_connection(message):
    """And what it had is free."""
    world = StagingWorld()
    (load,) = world.load(world.p.lend(2), size=2)
    world.run()
    worker = world.decoders[0].workers[0]
    worker.link.send(worker.conn, message)
    world.run()

    assert (load.state, world.p.slots.granted) == ("failed", 0)


def test_a_part_is_read_when_every_worker_has_copied_it():
    """Half of it is no KV."""
    world = StagingWorld(ranks=2)
    world.p.copiers[1].stuck = True
    (load,) = world.load(world.p.lend(2), size=2)
    world.run()
    world.go_on()
    world.p.copiers[1].stuck = False
    world.run()
    world.go_on()

    assert (load.state, load.right) == ("done", True)


StagingMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestStaging = pytest.mark.slow(StagingMachine.TestCase)  # any order of events: seconds


@each_mutant(
    mutants.take_slots_from_the_slower_rank,
    mutants.forget_copies_that_run,
    mutants.keep_slots_after_the_lease,
    mutants.stage_without_a_lease,
    mutants.do_not_tell_a_worker_that_is_back,
    mutants.answer_nobody_when_it_ends,
    mutants.hand_out_slots_twice,
)
def test_a_broken_rule_is_noticed(monkeypatch, mutate):
    """Each mutant is one rule of the design turned off; its name says which promise it breaks."""
    mutate(monkeypatch)

    with pytest.raises(NOTICED):
        search(StagingMachine, 500)
