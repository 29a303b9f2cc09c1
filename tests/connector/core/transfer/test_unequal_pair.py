"""Engines of unequal shapes, both halves together: every byte that is lacking arrives, and no other is touched."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from support.unequal import A, Model, Shape, UnequalWorld
from xpyd_connector.core.messages import PushWritten
from xpyd_connector.core.results import LoadResult

TP = [
    (heads, p, d)
    for heads, p, d in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4))
    if max(heads, p) % min(heads, p) == 0 and max(heads, d) % min(heads, d) == 0
]


def pulled(*args, **options):
    world = UnequalWorld(*args, **options)
    world.pull()
    world.run()
    assert world.results() == [LoadResult(A, "")] * world.d.shape.ranks
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
def worlds(draw):
    """A model, two engines for it, and a prompt."""
    heads, p, d = draw(st.sampled_from(TP))
    groups = draw(st.lists(st.tuples(SIZES, st.sampled_from([0, 0, 2, 5, 9, 30])), min_size=1, max_size=3))
    model = Model(heads, tuple(window for _, window in groups))
    prompt = draw(st.integers(2, 60))
    shapes = Shape(p, tuple(size for (size, _), _ in groups)), Shape(d, tuple(size for (_, size), _ in groups))
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
    moved = sum(sample.bytes for sample in world.p.counters.take().transfers)
    there = sum(piece != b"before" for rank in range(world.d.shape.ranks) for piece in world.d.memory(rank))

    assert moved == there * 64


def test_block_sizes_that_have_only_a_multiple_in_common():
    """Groups of 8 and 12 tokens: up to token 12 one group's blocks are complete, the other's second is not."""
    world = pushed(Model(1, (0, 0)), Shape(1, (8, 12)), Shape(1, (8, 12)), prompt=50, chunks=range(1, 50))
    moved = sum(sample.bytes for sample in world.p.counters.take().transfers)

    assert moved == sum(piece != b"before" for piece in world.d.memory(0)) * 64


def test_a_lease_ends_when_the_last_rank_has_read():
    """However many ranks it was read from."""
    world = UnequalWorld(Model(4), Shape(2), Shape(4))
    world.d.movers[3].stuck = True
    world.pull()
    world.run()
    assert world.results() == [LoadResult(A, "")] * 3
    assert world.p.lease_manager.take_released() == []
    world.d.movers[3].stuck = False
    world.run()

    assert world.results() == [LoadResult(A, "")]
    assert [released.why.name for released in world.p.lease_manager.take_released()] == ["DONE"]


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

    assert [released.why.name for released in world.p.lease_manager.take_released()] == ["DONE"]
