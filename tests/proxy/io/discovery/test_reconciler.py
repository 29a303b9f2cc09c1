"""What the sources say becomes what the router has, whichever of them speaks, and in whatever order."""

import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from pdrelay_proxy.core.discovery.sources import MAX_ENGINES
from pdrelay_proxy.core.discovery.store_entries import (
    entry_of,
)
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.target import EngineSource, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.core.steps import finish
from support.discovery_world import A, B, D, E, World, stored, turn_now


def test_what_the_settings_name_is_left_alone():
    """A pod at such an address changes nothing, nor does its end."""
    world = World("b:80")
    world.see(B)
    world.see()

    assert world.there == [("decode-0", "b:80", HealthState.STARTING)]


def test_an_engine_that_the_settings_claim_stays_when_its_pod_goes():
    """SIGHUP named it after it was found."""
    world = World()
    world.see(A)
    world.registry.claim(Role.PREFILL, A.target)
    world.see()

    assert world.there == [("prefill-0", "a:80", HealthState.STARTING)]


@pytest.mark.parametrize("is_named", [True, False])
async def test_an_engine_of_the_settings_comes_when_another_leaves_its_place(is_named):
    """SIGHUP named as prefill what an operator had added as decode, and turned: it would be back with a restart."""
    world = World("other:80")
    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    await turn_now(world, "decode-1", EngineRole.PREFILL)
    world.registry.claim(Role.PREFILL, Target.parse("d:80"))
    world.reconcile()
    assert [name for name, *_ in world.there] == ["decode-0", "decode-1"]
    if not is_named:
        world.registry.unclaim(Role.PREFILL, "d:80")
    await world.changes.remove("decode-1")
    world.reconcile()
    world.see()  # it is of no source

    assert [name for name, *_ in world.there] == ["decode-0", *["prefill-0"] * is_named]


def test_an_engine_that_the_settings_drop_comes_back_if_somebody_else_wants_it():
    """At the next look, under a new name: the old one goes with what it has."""
    world = World()
    world.see(A)
    world.registry.departures.retire(world.registry.members()[0].instance.id, now=1)
    world.reconcile()

    assert world.there == [("prefill-0", "a:80", HealthState.DRAINING), ("prefill-1", "a:80", HealthState.STARTING)]


def test_that_engines_are_left_out_is_said_once_and_they_come_when_there_is_room(caplog):
    """An engine that serves nothing, of which no line tells, is looked for in vain."""
    world = World()
    leaving = {str(n): f'{{"role":"decode","target":"h{n}:80","leaves":true}}' for n in range(MAX_ENGINES)}
    finish(world.entries.view_in_steps(leaving))
    for _ in range(2):
        finish(world.entries.view_in_steps({**leaving, "a": entry_of(A)}))
    assert world.there == []

    del leaving["7"]
    finish(world.entries.view_in_steps({**leaving, "a": entry_of(A)}))
    assert [name for name, *_ in world.there] == ["prefill-0"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said == ["store: there are more than 50000 engines: 1 left out until others have gone"]


def test_all_engines_are_compared_in_steps_and_only_if_some_came_or_went():
    """In one go, and each second in which any health had changed, it kept requests waiting for 12 ms."""
    world = World()
    world.see(*(Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"u{n}") for n in range(300)))
    world.reconcile()
    name = world.registry.members()[7].instance.id
    world.registry.member(name).life.seen(now=1)
    assert list(world.reconciler.reconcile()) == []

    world.registry.remove(name, now=1)
    assert len(list(world.reconciler.reconcile())) >= 6
    assert world.there[-1] == ("decode-300", "h7:80", HealthState.STARTING)


def test_a_view_of_all_pods_is_taken_in_steps_and_heard_when_they_are_done():
    """In one go, the first LIST of 2,000 pods kept every stream waiting for 68 ms."""
    world = World()
    most = 20
    pods = {f"u{n}": Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"u{n}") for n in range(1000)}
    counts = [0]
    synced = list[bool]()
    for _ in world.pods.view_in_steps(pods):
        counts.append(len(world.registry.members()))
        synced.append(EngineSource.PODS not in world.discovery.missing)

    assert max(after - before for before, after in pairwise(counts)) <= most
    assert not any(synced)
    assert len(world.registry.members()) == 1000
    assert EngineSource.PODS not in world.discovery.missing
    assert {member.origin.generation for member in world.registry.members()} == {1}

    for _ in world.pods.view_in_steps(dict(list(pods.items())[:200])):
        counts.append(len(world.registry.members()))

    assert max(abs(after - before) for before, after in pairwise(counts)) <= most
    assert len(world.registry.members()) == 200


@pytest.mark.parametrize("kind", ["pods", "store"])
def test_engines_that_go_do_so_before_others_take_their_addresses(kind):
    """A view in steps must not find an address taken by an engine that the same view takes away."""
    world = World()
    if kind == "pods":
        finish(
            world.pods.view_in_steps(
                {f"u{n}": Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"u{n}") for n in range(300)}
            )
        )
        finish(
            world.pods.view_in_steps(
                {f"v{n}": Wanted(Role.PREFILL, Target.parse(f"h{n}:80"), f"v{n}") for n in range(300)}
            )
        )
    else:
        finish(world.entries.view_in_steps(stored(range(300))))
        finish(world.entries.view_in_steps(stored(range(300), Role.PREFILL)))

    assert {member.instance.role for member in world.registry.members()} == {Role.PREFILL}
    assert len(world.registry.members()) == 300


def test_streams_move_from_a_pod_that_is_deleted():
    """Also if it was not ready before."""
    world = World()
    world.see(D, E)
    world.see(replace(D, leaves=True), E)
    assert not world.registry.departures.moving
    world.see(replace(D, leaves=True, moves=True), E)

    assert list(world.registry.departures.moving) == ["decode-0"]
