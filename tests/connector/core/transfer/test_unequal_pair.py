"""Engines of unequal shapes, both halves together: every byte that is lacking arrives, and no other is touched."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.control import ControlPlane
from pdrelay_connector.core.layout.shape_checks import check_layers
from pdrelay_connector.core.layout.source_ranks import needed_ranks
from pdrelay_connector.core.lease.kv_params import PushParams
from pdrelay_connector.core.messages import PushWritten
from pdrelay_connector.core.results import LoadResult
from pdrelay_connector.errors import IncompatiblePeer
from support.unequal import HOME, A, Model, P, Shape, T, UnequalWorld

TP = [
    (heads, p, d)
    for heads, p, d in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4))
    if max(heads, p) % min(heads, p) == 0 and max(heads, d) % min(heads, d) == 0
]


def pulled(*args, **options):
    world = UnequalWorld(*args, **options)
    world.pull()
    world.run()
    assert world.results() == [LoadResult(A, "")] * world.d.shape.workers
    world.check()
    return world


def pushed(*args, chunks=(), **options):
    world = UnequalWorld(*args, **options)
    world.push()
    world.run()
    for tokens in chunks:
        world.compute(tokens)
        world.run()
    world.compute(world.prompt, last=True)
    world.run()
    assert world.results() == [LoadResult(A, "")]
    world.check()
    return world


SIZES = st.sampled_from([(4, 4), (4, 8), (8, 4), (8, 8), (4, 16), (16, 8)])


@st.composite
def stages(draw, layers):
    """Cut so many layers into pipeline stages."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    return tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, layers]))


@st.composite
def worlds(draw):
    """A model, two engines for it, and a prompt."""
    heads, p, d = draw(st.sampled_from(TP))
    groups = draw(st.lists(st.tuples(SIZES, st.sampled_from([0, 0, 2, 5, 9, 30])), min_size=1, max_size=3))
    model = Model(heads, tuple(window for _, window in groups), depth=draw(st.integers(1, 3)))
    prompt = draw(st.integers(2, 60))
    cuts = draw(stages(len(model.layers))), draw(stages(len(model.layers)))
    shapes = (
        Shape(p, tuple(size for (size, _), _ in groups), cuts[0]),
        Shape(d, tuple(size for (_, size), _ in groups), cuts[1]),
    )
    external = draw(st.integers(1, prompt - 1))
    return {"model": model, "p": shapes[0], "d": shapes[1], "prompt": prompt, "external": external}


@given(worlds())
def test_any_two_engines_pull(options):
    """Every shape at once."""
    pulled(**options)


@given(worlds(), st.sets(st.integers(1, 59)))
def test_any_two_engines_push(options, chunks):
    """And wherever a step ends: nothing is written before it is complete, and nothing twice."""
    world = pushed(**options, chunks=sorted(chunk for chunk in chunks if chunk < options["prompt"]))
    moved = sum(sample.bytes for sample in world.p.counters.take_report().transfers)
    there = sum(piece != b"before" for info in world.d.infos for piece in world.d.memory(info.worker))

    assert moved == there * 64


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(("p", "d"), [((3, 3), ()), ((), (1, 5)), ((4, 2), (1, 2, 3)), ((1, 2, 3), (3, 3))], ids=str)
@pytest.mark.parametrize("move", [pulled, pushed])
def test_pipeline_stages_that_are_cut_differently(move, p, d, tp):
    """Each worker reads or writes the layers that it shares with a worker of the other engine. One group is apart."""
    model = Model(2, (0, 5), depth=3)
    world = move(model, Shape(tp[0], (4, 8), p), Shape(tp[1], (8, 4), d), prompt=37)
    (ended,) = world.p.lease_manager.take_released()

    assert ended.reason.name == "DONE"


def test_a_lease_of_stages_ends_when_the_last_stage_has_read():
    """Two stages of two ranks are four readers, also if ranks of different stages have the same number."""
    ends_when_the_fourth_has_read(UnequalWorld(Model(2, depth=2), Shape(2, stages=(1, 1)), Shape(2, stages=(1, 1))))


def test_layers_that_one_engine_lacks_are_named():
    """D's plan is the union over the stages of P: what is missing there would stay unread."""
    ours, theirs = (UnequalWorld(Model(depth=depth)).p.infos for depth in (2, 3))
    check_layers(ours, UnequalWorld(Model(depth=2), Shape(stages=(1, 1))).p.infos)
    with pytest.raises(IncompatiblePeer, match=r"it has the layer 2\.0, which we lack"):
        check_layers(ours, theirs)
    with pytest.raises(IncompatiblePeer, match=r"we have the layer 2\.0, which it lacks"):
        check_layers(theirs, ours)
    with pytest.raises(IncompatiblePeer, match=r"it says nothing of 2\.0 on its rank 0"):
        needed_ranks(theirs[0], ours)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_engines_of_other_shapes_are_known_before_a_load(mode):
    """In both modes; P's blocks are free as soon as D knows it."""
    world = UnequalWorld(p=Shape(sizes=(8,)), d=Shape(sizes=(12,)))
    p = world.p
    d = world.d
    coordinator = {}
    if mode == "push":
        coordinator["push_coordinator"] = p.push_coordinator
    control = ControlPlane(p.lease_manager, p.lease_renewer, p.peers, p.counters, **coordinator)
    p.cores = [(p.link, control)]
    d.cores = [(d.link, ControlPlane(d.lease_manager, d.lease_renewer, d.peers, d.counters))]
    control.grant(T, now=0.0)
    d.lease_renewer.start_renewing(A, PushParams(P, *HOME[P], T, T), now=0.0)
    d.lease_renewer.report_handshake(P, now=0.0)
    world.run()
    (ended,) = d.lease_renewer.take_handshakes()
    d.lease_renewer.release(A, P)
    world.run()
    released = p.lease_manager.take_released()

    assert ended.objection == "region 0: its blocks have 8 tokens, ours 12; one must be a multiple of the other"
    assert [lease.reason.name for lease in released] == ["DROPPED"]


def test_block_sizes_that_have_only_a_multiple_in_common():
    """Groups of 8 and 12 tokens: up to token 12 one group's blocks are complete, the other's second is not."""
    world = pushed(Model(1, (0, 0)), Shape(1, (8, 12)), Shape(1, (8, 12)), prompt=50, chunks=range(1, 50))
    moved = sum(sample.bytes for sample in world.p.counters.take_report().transfers)

    assert moved == sum(piece != b"before" for piece in world.d.memory(0)) * 64


def test_a_lease_ends_when_the_last_rank_has_read():
    """However many ranks it was read from."""
    ends_when_the_fourth_has_read(UnequalWorld(Model(4), Shape(2), Shape(4)))


def ends_when_the_fourth_has_read(world):
    """Of four workers of D."""
    world.d.movers[3].stuck = True
    world.pull()
    world.run()
    assert world.results() == [LoadResult(A, "")] * 3
    assert world.p.lease_manager.take_released() == []
    world.d.movers[3].stuck = False
    world.run()

    assert world.results() == [LoadResult(A, "")]
    assert [released.reason.name for released in world.p.lease_manager.take_released()] == ["DONE"]


def test_one_unreadable_rank_fails_the_load_once_and_late_bytes_hit_no_other_request():
    """It lingers until the reads of the other ranks are over."""
    world = UnequalWorld(Model(4), Shape(4), Shape(1))
    mover = world.d.movers[0]
    world.pull()
    mover.stuck = True
    world.run()
    mover.clinging = True
    mover._peers.discard("p0/2")
    world.run()
    (failed,) = world.results()
    assert (failed.failure, failed.quarantined) == ("NIXL: peer gone", True)
    assert world.results() == []
    mover.clinging = False
    world.run()

    assert [type(news).__name__ for news in world.results()] == ["BlocksReleased"]
    assert len(world.readers[0]) == 0


def test_a_rank_that_has_nothing_to_write_says_so_when_the_prompt_is_complete():
    """Another rank keeps the same heads; the push is over when all of them have spoken."""
    world = UnequalWorld(Model(1), Shape(2), Shape(1))
    said = []
    for mover in world.p.movers:
        mover.stuck = True
    world.push()
    for writer in world.writers:
        send = writer._link.send
        writer._link.send = lambda conn, message, rank=writer._own.rank, send=send: (
            said.append((rank, type(message))), send(conn, message),
        )  # fmt: skip
    world.run()
    world.compute(world.prompt, last=True)
    world.run()
    assert [rank for rank, kind in said if kind is PushWritten] == [1]
    assert world.p.movers[1]._xfers == {}
    assert world.results() == []
    world.p.movers[0].stuck = False
    world.run()

    assert world.results() == [LoadResult(A, "")]
    assert [rank for rank, kind in said if kind is PushWritten] == [1, 0]


def test_what_looks_back_no_further_than_itself_is_lacking_nothing():
    """A chunk that begins with the last prompt token, in a model without other layers: there is nothing to move."""
    model = Model(1, (1,))
    world = pulled(model)
    pushed(model)

    assert [released.reason.name for released in world.p.lease_manager.take_released()] == ["DONE"]
