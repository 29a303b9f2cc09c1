"""What engines serve is forgotten when no router of the store names them any more."""

import asyncio
import logging

import pytest

from pdrelay_proxy.core.discovery.store_entries import (
    Assignment,
    assignment_name,
    assignment_of,
)
from pdrelay_proxy.core.discovery.unnamed_assignments import GRACE_S
from pdrelay_proxy.core.fleet.target import EngineSource, Target
from pdrelay_proxy.core.model import Role
from support.discovery_world import BOTH, DECODE, PREFILL, A, CommonStore, D, World, serving, turn_now
from support.simulated_loop import advance, in_simulated_time


async def look(*worlds, seconds):
    """Let so much time pass, in which all routers look at what engines serve."""
    for _ in range(int(seconds / 5)):
        for world in worlds:
            world.now += 5
            for source in world.reconciler.sources.views if world.hears else ():
                world.reconciler.heard(source)
            await world.discovery.drop_unnamed_assignments()


async def test_another_engine_at_the_address_of_one_that_is_gone_serves_its_own_role(caplog):
    """The settings named the one that has turned, and name it no more: the next one would serve prefill unasked."""
    caplog.set_level(logging.INFO)
    world = World("d:80", "e:80")
    world.see(A)
    await turn_now(world, "decode-0", PREFILL)
    world.registry.member("decode-0").load.enter("r")
    world.registry.departures.retire("decode-0", now=1)
    await look(world, seconds=600)
    assert world.store._entries  # it has a stream

    world.registry.member("decode-0").load.leave("r")
    for _ in range(2):
        world.registry.settle(patience_s=0, now=world.now)
    await look(world, seconds=GRACE_S + 10)
    assert not world.store._entries
    assert "no router knows a decode engine at d:80 any more" in caplog.text
    world.registry.add_target(Role.DECODE, Target.parse("d:80"), now=3)
    world.reconciler.reconcile()
    assert serving(world)["decode-2"] is DECODE


@pytest.mark.parametrize("before", ["settings", "pod"])
async def test_an_engine_that_is_added_by_hand_serves_what_was_asked_for(before):
    """Not what an engine before it at this address had turned to: its entry is deleted only half a minute later."""
    world = World("e:80", *["d:80"] * (before == "settings"))
    world.see(*[D] * (before == "pod"))
    await turn_now(world, "decode-1", PREFILL)
    world.see()
    if before == "settings":
        world.registry.departures.retire("decode-1", now=1)
        world.registry.settle(patience_s=0, now=1)
    assert "decode-1" not in serving(world)

    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    await look(world, seconds=5)

    assert serving(world)["decode-2"] is DECODE
    assert not world.reconciler.roles.assignments


@pytest.mark.parametrize("why", ["a source was never heard", "a source was not heard lately"])
async def test_what_engines_serve_is_kept_while_it_is_not_known_which_there_are(why):
    """A pod may be at the address, or another router may have said so in the store."""
    world = World("d:80", "e:80")
    if why == "a source was not heard lately":
        world.see()
        world.hears, world.now = False, 100.0
    await turn_now(world, "decode-0", PREFILL)
    world.registry.remove("decode-0", now=1)
    await look(world, seconds=600)

    assert [one.is_unnamed for one in world.reconciler.roles.assignments.values()] == [False]


async def test_a_turn_that_is_made_while_doubts_are_written_stands():
    """They are written one after the other, and a store may take its time for each."""
    world = World("a:80", "d:80", "e:80")
    world.see()
    for name in ("decode-0", "decode-1"):
        await turn_now(world, name, PREFILL)
        world.registry.remove(name, now=1)
    first, second = world.reconciler.roles.assignments
    put = world.store.put
    written = []

    async def slow(name, text):
        await put(name, text)
        written.append(name)
        if len(written) == 1:
            await put(assignment_name(second), assignment_of(Assignment(second, BOTH)))

    world.store.put = slow
    await world.discovery.drop_unnamed_assignments()

    assert written == [assignment_name(first)]
    assert world.reconciler.roles.assignments[second] == Assignment(second, BOTH)


def test_a_store_that_does_not_answer_holds_up_no_comparison_of_engines():
    """What is to be forgotten waits for it, for minutes if it is a ConfigMap; engines that are missing do not."""

    async def scene():
        world = World()
        world.see(D)
        entry = Assignment(A.key, DECODE)
        await world.store.put(assignment_name(A.key), assignment_of(entry))
        hung = asyncio.Event()

        async def hangs(_name, _text):
            hung.set()
            await asyncio.Event().wait()

        world.store.put = hangs
        async with world.discovery.running():
            world.now = 60.0
            world.reconciler.heard(EngineSource.PODS)
            world.reconciler.heard(EngineSource.STORE)
            await advance(8.0)
            assert hung.is_set()
            world.registry.remove("decode-0", now=1)
            await advance(2.0)
        return list(serving(world))

    assert in_simulated_time(scene())[1] == ["decode-1"]


@pytest.mark.parametrize("kind", ["settings", "pod"])
async def test_what_an_engine_serves_is_kept_for_another_router_that_names_it(kind):
    """A rollout of settings takes its time, and routers of one store may have different pods."""
    here, other = World("e:80", *["d:80"] * (kind == "settings")), World("e:80")
    store = CommonStore(here, other)
    here.see(*[D] * (kind == "pod"))
    other.see()
    store.tell()
    await turn_now(here, "decode-1", PREFILL)
    writes = []
    put = store.put

    async def counted(name, text):
        writes.append(text)
        await put(name, text)

    store.put = counted
    await look(here, other, seconds=590)
    assert [one.is_unnamed for one in here.reconciler.roles.assignments.values()] == [False]
    assert len(writes) == 2  # one has doubted it, the other has spoken for it

    await look(other, seconds=GRACE_S + 30)  # the one that names it is gone
    assert not store.entries
