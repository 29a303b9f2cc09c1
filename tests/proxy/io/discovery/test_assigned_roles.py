"""What an engine serves is what was assigned to it, in place of what its source says."""

from dataclasses import replace

import pytest

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.io.discovery.entries import Entries
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from support.discovery_world import BOTH, DECODE, PREFILL, A, D, E, World, serving, turn_now


@pytest.mark.parametrize("kind", ["settings", "pod", "store"])
async def test_a_source_that_says_the_same_again_does_not_undo_a_turn(kind):
    """Whatever it is; a look at everything neither."""
    world = World(*(["d:80", "e:80"] if kind == "settings" else []))
    if kind == "pod":
        world.see(D, E)
    elif kind == "store":
        for wanted in (D, E):
            await world.changes.add(wanted.role, wanted.target)
    await turn_now(world, "decode-0", PREFILL)
    for pods in ((E, D), (D, E)) if kind == "pod" else ((), ()):
        world.see(*pods)
    world.reconcile()

    assert serving(world) == {"decode-0": PREFILL, "decode-1": DECODE}
    await turn_now(world, "decode-0", DECODE)
    world.registry.settle(patience_s=0, now=1)
    assert serving(world) == {"decode-0": DECODE, "decode-1": DECODE}
    assert not world.reconciler.roles.assignments


async def test_a_pod_of_both_roles_serves_both_until_it_turns_and_then_only_that():
    """Also at a router that starts later; the other pod and the next one at its place serve both."""
    world, late = World(), World()
    either = replace(D, serves_both=True), replace(E, serves_both=True)
    world.see(*either)
    assert serving(world) == {"decode-0": BOTH, "decode-1": BOTH}

    await turn_now(world, "decode-0", PREFILL)
    await turn_now(world, "decode-1", DECODE)
    world.registry.settle(patience_s=0, now=1)
    world.see(*either)
    finish(late.entries.view_in_steps(dict(world.store._entries)))
    late.see(*either)

    assert serving(world) == serving(late) == {"decode-0": PREFILL, "decode-1": DECODE}
    world.see(either[0], replace(either[1], identity="uid-f"))
    assert serving(world) == {"decode-0": PREFILL, "decode-2": BOTH}
    await turn_now(world, "decode-0", BOTH)
    assert serving(world) == {"decode-0": BOTH, "decode-2": BOTH}


async def test_a_source_that_changes_the_role_ends_what_was_turned():
    """The pod has another label by now: it is another engine, which serves what its label says."""
    world = World()
    world.see(D, E)
    await turn_now(world, "decode-0", PREFILL)
    world.see(replace(D, role=Role.PREFILL), E)

    assert serving(world) == {"decode-1": DECODE, "prefill-0": PREFILL}


async def test_another_pod_at_the_address_serves_what_its_label_says():
    """The pod that has turned is gone; the next turn forgets what was said of it."""
    world = World()
    world.see(D, E)
    await turn_now(world, "decode-0", PREFILL)
    world.see(E)
    world.see(replace(D, identity="uid-f"), E)
    assert serving(world) == {"decode-1": DECODE, "decode-2": DECODE}
    world.see(E, A)
    await turn_now(world, "prefill-0", BOTH)

    assert [key.authority for key in world.reconciler.roles.assignments] == ["a:80"]


async def turns_beside_an_assignment(*, pods, age_s=0.0):
    """Return whose assignments are left when a router that has just started turns an engine; one was of pod D."""
    world = World()
    world.see(D, E)
    await turn_now(world, "decode-0", PREFILL)
    late = World()
    late.store._entries |= world.store._entries
    finish(late.entries.view_in_steps(dict(world.store._entries)))
    late.see(*pods, E, A)
    late.now = age_s
    await late.changes.change_role("prefill-0", BOTH)
    return sorted(key.authority for key in late.reconciler.roles.assignments)


async def test_a_pod_that_is_not_ready_when_a_router_starts_keeps_its_role():
    """It is no engine of that router yet, and the pod is the same when it is Ready again."""
    assert await turns_beside_an_assignment(pods=[replace(D, leaves=True)]) == ["a:80", "d:80"]


@pytest.mark.parametrize("pods", [[], [replace(D, identity="uid-f")]], ids=["gone", "another"])
async def test_a_pod_is_gone_if_those_that_there_are_were_heard_of_lately(pods):
    """Else a router that cannot reach Kubernetes would turn what it does not know of."""
    assert await turns_beside_an_assignment(pods=pods, age_s=60.0) == ["a:80"]
    assert await turns_beside_an_assignment(pods=pods, age_s=100.0) == ["a:80", "d:80"]


async def test_a_pod_that_is_not_ready_for_a_while_still_turns():
    """Unready it drains, Ready it is back in use: neither ends the turn."""
    world = World()
    world.see(D, E)
    await world.changes.change_role("decode-0", PREFILL)
    world.see(replace(D, leaves=True), E)
    world.see(D, E)
    world.registry.settle(patience_s=60, now=1)

    assert serving(world) == {"decode-0": PREFILL, "decode-1": DECODE}
    assert world.there[0][2] is HealthState.STARTING


async def test_a_router_that_starts_serves_what_the_store_says_at_once():
    """It has nothing at any engine, so there is nothing to wait for; engines that come later do as well."""
    world = World("d:80", "e:80")
    await turn_now(world, "decode-0", PREFILL)
    told = dict(world.store._entries)
    late = World("d:80", "e:80")
    late.reconciler = Reconciler(late.registry, [EngineSource.STORE], lambda: 0.0)
    finish(Entries(late.reconciler).view_in_steps(told))
    assert serving(late) == {"decode-0": PREFILL, "decode-1": DECODE}
    found = World("e:80")
    finish(found.entries.view_in_steps(told))
    found.see(D)

    assert serving(found) == {"decode-0": DECODE, "decode-1": PREFILL}
    assert not found.registry.departures.moving
    assert [late.registry.departures.turns, found.registry.departures.turns] == [{}, {}]


async def test_two_routers_of_one_store_agree():
    """Each has its own requests at the engine, and turns when they are over."""
    world, other = World("d:80", "e:80"), World("d:80", "e:80")
    other.registry.member("decode-0").load.enter("r")
    await turn_now(world, "decode-0", PREFILL)
    finish(other.entries.view_in_steps(dict(world.store._entries)))
    other.registry.settle(patience_s=60, now=1)
    assert (serving(world)["decode-0"], serving(other)["decode-0"]) == (PREFILL, DECODE)
    other.registry.member("decode-0").load.leave("r")
    other.registry.settle(patience_s=60, now=2)
    assert serving(other) == serving(world)
    await world.changes.change_role("decode-0", DECODE, force=True)
    await world.changes.undrain("decode-0")
    finish(other.entries.view_in_steps(dict(world.store._entries)))

    assert serving(other) == serving(world) == {"decode-0": PREFILL, "decode-1": DECODE}
    assert all(member.turn is None for member in other.registry.members())
