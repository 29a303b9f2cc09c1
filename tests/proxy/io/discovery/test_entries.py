"""What a store has becomes engines and their roles, in steps."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.discovery.store_entries import (
    Assignment,
    assignment_name,
    assignment_of,
    entry_of,
)
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.io.discovery.entries import Entries
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from support.discovery_world import DECODE, B, World, cut_off, serving, stored

PLACES = st.sampled_from(["a:1", "b:1", "c:1"])
TEXTS = st.one_of(
    st.none(),  # the entry is gone
    st.builds(
        lambda role, place, leaves: entry_of(Wanted(role, Target.parse(place), leaves=leaves)),
        st.sampled_from(Role),
        PLACES,
        st.booleans(),
    ),
    st.builds(
        lambda role, place, serves: assignment_of(Assignment(Key(role, place), serves)),
        st.sampled_from(Role),
        PLACES,
        st.sampled_from(EngineRole),
    ),
    st.just("{}"),
)


@given(st.lists(st.dictionaries(st.sampled_from("uvw"), TEXTS), min_size=1, max_size=8))
def test_a_router_that_followed_a_store_wants_what_one_that_starts_would(steps):
    """It looks at the entries alone that have changed, of what may be thousands."""
    follower = World()
    entries = {}
    for step in steps:
        entries = {name: text for name in "uvw" if (text := step.get(name, entries.get(name))) is not None}
        finish(follower.entries.view_in_steps(dict(entries)))
        late = World()
        finish(late.entries.view_in_steps(dict(entries)))

        assert follower.reconciler.roles.assignments == late.reconciler.roles.assignments
        wanted = [each.reconciler.sources.views[EngineSource.STORE].engines for each in (follower, late)]
        assert wanted[0].keys() == wanted[1].keys()
        assert {key: one.leaves for key, one in wanted[0].items()} == {
            key: one.leaves for key, one in wanted[1].items()
        }


def test_a_view_of_a_store_is_taken_in_steps_and_heard_when_they_are_done():
    """The first one of 2,000 entries kept every stream waiting for 290 ms; what has turned is so from the beginning."""
    registry = Registry()
    registry.add_target(Role.DECODE, Target.parse("static:80"), now=0)
    reconciler = Reconciler(registry, [EngineSource.STORE], lambda: 0.0)
    entries = Entries(reconciler)
    counts = [1]
    synced = list[bool]()
    turns = [Assignment(Key(Role.DECODE, place), EngineRole.PREFILL) for place in ("static:80", "h7:80")]
    turned = {assignment_name(one.key): assignment_of(one) for one in turns}
    for _ in entries.view_in_steps({**stored(range(1000)), **turned}):
        counts.append(len(registry.members()))
        synced.append(not reconciler.sources.missing)
        found = [m for m in registry.members() if m.instance.address.authority in ("static:80", "h7:80")]
        assert len(counts) < 25 or {m.role for m in found} == {EngineRole.PREFILL}  # they are read first

    assert max(after - before for before, after in pairwise(counts)) <= 20
    assert not any(synced)
    assert len(registry.members()) == 1001
    assert not reconciler.sources.missing
    assert Counter(m.role for m in registry.members()) == {EngineRole.PREFILL: 2, EngineRole.DECODE: 999}

    counts = [len(registry.members()) for _ in entries.view_in_steps(stored(range(200)))]
    assert max(before - after for before, after in pairwise([1001, *counts])) <= 20
    assert len(registry.members()) == 201


async def test_a_view_that_comes_while_another_is_taken_in_waits_and_the_latest_counts():
    """Else a step of the first one would take out again what the second one has brought."""
    world = World()
    names = list[set[str]]()
    views = [stored(range(300)), stored(range(600, 900)), stored(range(100, 400)), stored(range(100, 401))]

    async def take(view):
        await world.entries.receive(view)
        names.append({member.instance.address.host for member in world.registry.members()})

    tasks = [asyncio.create_task(take(view)) for view in views[:3]]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert names == [{f"h{n}" for n in range(100, 400)}] * 2
    assert world.registry.members()[-1].instance.id == "decode-399", "the second one was taken in, or the first in part"

    await take(views[3])
    assert len(names[-1]) == 301


async def test_a_view_whose_task_is_cancelled_is_taken_in_as_a_whole():
    """Its store tells it once: what was left would come with the next restart."""
    world = World()
    await cut_off(world, world.entries.receive(stored(range(300))))

    assert len(world.registry.members()) == 300


def test_an_entry_that_is_renamed_takes_no_engine_out():
    """However many others change in the same view: the steps go by place, not by name."""
    world = World()
    finish(world.entries.view_in_steps({"old": entry_of(B), **stored(range(300))}))
    before = world.registry.members()[:2]
    finish(world.entries.view_in_steps({**stored(range(300, 600)), "new": entry_of(B)}))

    assert [member.instance.id for member in before] == ["decode-0", "decode-1"]
    assert [world.registry.get(member.instance.id) for member in before] == [*before]


def test_an_assignment_costs_a_look_at_its_engine_alone():
    """Each one cost a look at all of 2,000 engines, in one step of 8 ms."""
    world = World()
    finish(world.entries.view_in_steps(stored(range(300))))
    turn = Assignment(Key(Role.DECODE, "h7:80"), EngineRole.PREFILL)
    finish(world.entries.view_in_steps({**stored(range(300)), assignment_name(turn.key): assignment_of(turn)}))
    assert [m.instance.id for m in world.registry.members() if m.heading is EngineRole.PREFILL] == ["decode-7"]

    finish(world.entries.view_in_steps(stored(range(300))))
    assert [m.instance.id for m in world.registry.members() if m.heading is EngineRole.PREFILL] == []


@pytest.mark.parametrize(
    "text",
    [
        '{"declared":"decode","at":"d:80","serves":"sideways"}',
        '{"declared":"decode","at":"no port","serves":"prefill"}',
        '{"declared":"decode","serves":"prefill"}',
    ],
)
def test_an_assignment_that_is_none_is_left_out(text, caplog):
    """Somebody has edited the store: one line says so, and no engine changes."""
    world = World("d:80", "e:80")
    finish(world.entries.view_in_steps({"turn.decode.d_3a80": text}))

    assert serving(world) == {"decode-0": DECODE, "decode-1": DECODE}
    assert "left out: entry turn.decode.d_3a80" in caplog.text
