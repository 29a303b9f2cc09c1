"""What an operator orders of an engine, all routers of the store do."""

import asyncio
from dataclasses import replace

import pytest

from pdrelay_proxy.core.discovery.store_entries import entry_name, entry_of, read_entry
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Target, Wanted
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.errors import AlreadyKnown, CannotTurn, UnknownInstance
from pdrelay_proxy.io.discovery.engine_changes import NotManagedHere
from pdrelay_proxy.io.discovery.store import StoreNotWritten
from support.discovery_world import BOTH, DECODE, PREFILL, A, B, CommonStore, D, World, serving, turn_now


async def test_what_an_operator_does_to_a_pod_is_not_undone():
    """Only what discovery drained it takes back into use."""
    world = World()
    world.see(A)
    await world.changes.drain("prefill-0")
    world.see(A, B)
    world.reconcile()
    assert world.there[0] == ("prefill-0", "a:80", HealthState.DRAINING)

    with pytest.raises(NotManagedHere, match="delete the pod"):
        await world.changes.remove("prefill-0")


async def test_what_is_added_is_in_the_store_and_what_is_removed_is_not():
    """All ranks of an address come and go together."""
    world = World()
    await world.changes.add(Role.DECODE, B.target)
    assert [name for name, *_ in world.there] == ["decode-0", "decode-1"]
    with pytest.raises(AlreadyKnown, match="decode-0"):
        await world.changes.add(Role.DECODE, B.target)

    await world.changes.remove("decode-1")
    assert world.there == []
    with pytest.raises(UnknownInstance):
        await world.changes.remove("decode-1")


async def test_all_routers_of_a_store_move_the_streams_of_an_engine():
    """Each has some; none does once the engine is in use again."""
    world = World()
    await world.changes.add(Role.DECODE, Target.parse("a:1"))
    await world.changes.drain("decode-0")
    assert not world.registry.departures.moving
    await world.changes.drain("decode-0", moves=True)
    other = World()
    finish(other.reconciler.view_in_steps(EngineSource.STORE, [replace(wanted_of(world), leaves=False)]))
    finish(other.reconciler.view_in_steps(EngineSource.STORE, [wanted_of(world)]))

    assert list(world.registry.departures.moving) == list(other.registry.departures.moving) == ["decode-0"]
    await world.changes.undrain("decode-0")
    finish(other.reconciler.view_in_steps(EngineSource.STORE, [wanted_of(world)]))
    assert not world.registry.departures.moving
    assert not other.registry.departures.moving


def wanted_of(world):
    """What the store of a router has of its first engine."""
    return world.registry.members()[0].origin.wanted


async def test_a_store_that_is_full_says_so():
    """And nothing was added."""
    world = World(max_engines=1)
    await world.changes.add(Role.DECODE, Target.parse("a:1"))
    with pytest.raises(StoreNotWritten, match="as many as"):
        await world.changes.add(Role.DECODE, Target.parse("b:1"))
    assert len(world.there) == 1


ORDERS = {
    "remove": lambda changes, name: changes.remove(name),
    "drain": lambda changes, name: changes.drain(name),
    "undrain": lambda changes, name: changes.undrain(name),
}


@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_is_for_the_engine_of_its_id_and_not_for_the_next_one_at_its_address(order):
    """Another router has removed it and added a new one, and this one has not heard of it yet."""
    world, other = World(), World()
    store = CommonStore(world, other)
    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    if order == "undrain":
        await world.changes.drain("decode-0")
    store.deaf = world
    await other.changes.remove("decode-0")
    await other.changes.add(Role.DECODE, Target.parse("d:80"))
    before = dict(store.entries)
    with pytest.raises(UnknownInstance, match="decode-0 is gone"):
        await ORDERS[order](world.changes, "decode-0")

    assert store.entries == before
    assert world.there == other.there == [("decode-1", "d:80", HealthState.STARTING)]


@pytest.mark.parametrize("order", ["remove", "drain"])
async def test_an_order_changes_the_entry_of_its_engine_whatever_that_is_called(order):
    """Somebody has written the file: the order was confirmed, and changed nothing, or another engine."""
    world = World()
    texts = {address: entry_of(Wanted(Role.DECODE, Target.parse(address))) for address in ("d:80", "e:80")}
    await world.store.put("mine", texts["d:80"])
    await world.store.put(entry_name(Key(Role.DECODE, "d:80")), texts["e:80"])
    await world.store.put("again", texts["d:80"])
    await ORDERS[order](world.changes, "decode-0")
    world.reconcile()

    left = [read_entry(text) for text in world.store._entries.values()]
    assert [(one.target.address.authority, one.leaves) for one in left] == {
        "remove": [("e:80", False)],
        "drain": [("d:80", True), ("e:80", False), ("d:80", True)],
    }[order]
    assert world.there == [
        *[("decode-0", "d:80", HealthState.DRAINING)] * (order == "drain"),
        ("decode-1", "e:80", HealthState.STARTING),
    ]


async def test_an_engine_that_still_has_streams_is_not_confused_with_the_next_one_at_its_address():
    """Its id is known for as long as they last: whoever removes it again means it."""
    world = World()
    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    world.registry.member("decode-0").load.enter("r")
    await world.changes.remove("decode-0")
    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    with pytest.raises(UnknownInstance, match="decode-0"):
        await world.changes.remove("decode-0")

    assert [name for name, _, state in world.there if state is HealthState.STARTING] == ["decode-1"]


async def test_an_engine_that_is_added_anew_between_two_views_is_another_one():
    """A router that polls sees no removal: it would keep what it knows of the one before."""
    world, other = World(), World()
    store = CommonStore(world, other)
    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    store.deaf = other
    await world.changes.remove("decode-0")
    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    store.deaf = None
    store.tell()

    assert [name for name, _, state in other.there if state is HealthState.STARTING] == ["decode-1"]


async def test_of_routers_that_give_the_same_order_none_is_refused():
    """It is as it was wanted, whoever was first."""
    worlds = [World() for _ in range(3)]
    store = CommonStore(*worlds)
    await worlds[0].changes.add(Role.DECODE, Target.parse("d:80"))
    await asyncio.gather(*[world.changes.drain("decode-0") for world in worlds])
    await asyncio.gather(*[world.changes.remove("decode-0") for world in worlds])

    assert store.entries == {}


async def test_an_order_does_not_undo_what_another_router_has_written():
    """One drains it, and one drains it by moving its streams: both hold."""
    world, other = World(), World()
    store = CommonStore(world, other)
    await world.changes.add(Role.DECODE, Target.parse("d:80"))
    await asyncio.gather(world.changes.drain("decode-0", moves=True), other.changes.drain("decode-0"))
    (text,) = store.entries.values()

    assert (read_entry(text).leaves, read_entry(text).moves) == (True, True)


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("is_idle", [True, False])
async def test_of_turns_that_begin_at_the_same_moment_none_takes_the_last_engine_of_a_role(routers, is_idle):
    """Whichever router is asked for which: each saw the other's engine as the one that stays."""
    worlds = [World("d:80", "e:80") for _ in range(routers)]
    store = CommonStore(*worlds)
    for world in worlds:
        world.see(A)
        if not is_idle:
            world.registry.member("decode-0").load.enter("r")
    asked = [
        worlds[0].changes.change_role("decode-0", PREFILL),
        worlds[-1].changes.change_role("decode-1", PREFILL),
    ]
    found = await asyncio.gather(*asked, return_exceptions=True)
    for world in worlds:
        world.registry.settle(patience_s=60, now=1)
        world.registry.settle(patience_s=0, now=2)
    refused = [error for error in found if error is not None]

    assert {type(error) for error in refused} == {CannotTurn}
    assert "is the last decode engine that serves" in str(refused[0])
    for world in worlds:
        assert any(member.heading is DECODE for member in world.registry.members())
    assert len(store.entries) == 2 - len(refused)


async def test_a_turn_that_is_refused_after_it_was_written_gives_back_what_was_assigned_before():
    """It had been both; and with force it turns all the same."""
    world = World("d:80", "e:80")
    CommonStore(world)
    world.see(A)
    await world.changes.change_role("decode-0", BOTH)
    first = asyncio.create_task(world.changes.change_role("decode-1", PREFILL, force=True))
    await asyncio.sleep(0)  # it waits for the store
    with pytest.raises(CannotTurn, match="decode-0 is the last decode engine"):
        await world.changes.change_role("decode-0", PREFILL)
    await first
    assert [member.heading for member in world.registry.members()] == [BOTH, PREFILL, PREFILL]
    await world.changes.change_role("decode-0", PREFILL, force=True)

    assert [member.heading for member in world.registry.members()] == [PREFILL, PREFILL, PREFILL]


async def test_an_engine_that_is_removed_leaves_no_assignment():
    """If it is added again, it serves what is said then."""
    world = World("e:80")
    await world.changes.add(D.role, D.target)
    await turn_now(world, "decode-1", PREFILL)
    await world.changes.remove("decode-1")
    assert not world.store._entries
    await world.changes.add(D.role, D.target)

    assert serving(world) == {"decode-0": DECODE, "decode-2": DECODE}


async def test_an_engine_that_cannot_turn_leaves_nothing_in_the_store():
    """The other routers must not hear of it."""
    world = World("d:80", "b:80#dp=2")
    with pytest.raises(CannotTurn, match="rank 0"):
        await world.changes.change_role("decode-1", PREFILL)
    world.see(A)
    with pytest.raises(CannotTurn, match="prefill-0 is the last"):
        await world.changes.change_role("prefill-0", DECODE)

    assert not world.store._entries
