"""What the sources say becomes what the router has, whichever of them speaks, and in whatever order."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_proxy.core.discovery.reconcile import MOST, entry_name, entry_of
from xpyd_proxy.core.fleet.health import HealthState
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.fleet.target import EngineSource, Target, Wanted
from xpyd_proxy.core.model import Role
from xpyd_proxy.errors import AddressError, AlreadyKnown, UnknownInstance
from xpyd_proxy.io.discovery.reconciler import Discovery, Entries, NotManagedHere, Pods, Reconciler
from xpyd_proxy.io.discovery.stores import StoreDown
from xpyd_proxy.io.discovery.stores.memory import MemoryStore

A = Wanted(Role.PREFILL, Target.parse("a:80#revision=v1"), "uid-a")
B = Wanted(Role.DECODE, Target.parse("b:80#dp=2"), "uid-b")


class World:
    """A registry, and what speaks to it."""

    def __init__(self, *static, most=MOST):
        self.now = 0.0
        self.registry = Registry()
        for text in static:
            self.registry.add_target(Role.DECODE, Target.parse(text), now=0)
        self.reconciler = Reconciler(self.registry, [EngineSource.PODS, EngineSource.STORE], lambda: self.now)
        self.pods = Pods(self.reconciler)
        self.entries = Entries(self.reconciler)
        self.store = MemoryStore(self.entries, most=most)
        self.discovery = Discovery(self.registry, self.reconciler, self.store)

    def see(self, *pods):
        self.pods.view({f"uid-{number}": pod for number, pod in enumerate(pods)})

    @property
    def there(self):
        return [(m.instance.id, m.instance.address.authority, m.life.state) for m in self.registry.members()]


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
    world.registry.claim(Role.PREFILL, "a:80")
    world.see()

    assert world.there == [("prefill-0", "a:80", HealthState.STARTING)]


def test_an_engine_that_the_settings_drop_comes_back_if_somebody_else_wants_it():
    """At the next look, under a new name: the old one goes with what it has."""
    world = World()
    world.see(A)
    world.registry.retire(world.registry.members()[0].instance.id, now=1)
    world.reconciler.reconcile()

    assert world.there == [("prefill-0", "a:80", HealthState.DRAINING), ("prefill-1", "a:80", HealthState.STARTING)]


async def test_what_an_operator_does_to_a_pod_is_not_undone():
    """Only what discovery drained it takes back into use."""
    world = World()
    world.see(A)
    await world.discovery.drain("prefill-0")
    world.see(A, B)
    world.reconciler.reconcile()
    assert world.there[0] == ("prefill-0", "a:80", HealthState.DRAINING)

    with pytest.raises(NotManagedHere, match="delete the pod"):
        await world.discovery.remove("prefill-0")


async def test_what_is_added_is_in_the_store_and_what_is_removed_is_not():
    """All ranks of an address come and go together."""
    world = World()
    await world.discovery.add(Role.DECODE, B.target)
    assert [name for name, *_ in world.there] == ["decode-0", "decode-1"]
    with pytest.raises(AlreadyKnown, match="decode-0"):
        await world.discovery.add(Role.DECODE, B.target)

    await world.discovery.remove("decode-1")
    assert world.there == []
    with pytest.raises(UnknownInstance):
        await world.discovery.remove("decode-1")


async def test_all_routers_of_a_store_move_the_streams_of_an_engine():
    """Each has some; none does once the engine is in use again."""
    world = World()
    await world.discovery.add(Role.DECODE, Target.parse("a:1"))
    await world.discovery.drain("decode-0")
    assert not world.registry.moving
    await world.discovery.drain("decode-0", moves=True)
    other = World()
    other.reconciler.view(EngineSource.STORE, [replace(wanted_of(world), leaves=False)])
    other.reconciler.view(EngineSource.STORE, [wanted_of(world)])

    assert list(world.registry.moving) == list(other.registry.moving) == ["decode-0"]
    await world.discovery.undrain("decode-0")
    other.reconciler.view(EngineSource.STORE, [wanted_of(world)])
    assert not world.registry.moving
    assert not other.registry.moving


def wanted_of(world):
    """What the store of a router has of its first engine."""
    return world.registry.members()[0].origin.wanted


async def test_a_store_that_is_full_says_so():
    """And nothing was added."""
    world = World(most=1)
    await world.discovery.add(Role.DECODE, Target.parse("a:1"))
    with pytest.raises(StoreDown, match="as many as"):
        await world.discovery.add(Role.DECODE, Target.parse("b:1"))
    assert len(world.there) == 1


def test_nonsense_is_left_out_and_said_once(caplog):
    """One bad label, or one entry that somebody edited, does not take the others with it."""
    caplog.set_level(logging.WARNING)
    world = World()
    for _ in range(3):
        world.see(A, AddressError("pod x has no container port named http"), None)
        world.entries.view({entry_name(B.key): entry_of(B), "decode.y": "{}"})

    assert [name for name, *_ in world.there] == ["prefill-0", "decode-0", "decode-1"]
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0:2] for line in said if "pod x" in line] == [
        ["left out", " pod x has no container port named http"]
    ]
    assert sum("entry decode.y" in line for line in said) == 1


PLACES = st.sampled_from(["a:1", "b:1", "c:1"])
OBJECTS = st.one_of(
    st.none(),
    st.builds(AddressError, st.sampled_from(["wrong", "worse"])),
    st.builds(
        lambda place, revision, identity, leaves: Wanted(
            Role.DECODE, Target.parse(f"{place}#revision={revision}"), identity, leaves=leaves
        ),
        PLACES,
        st.sampled_from(["r1", "r2"]),
        st.sampled_from(["", "x", "y"]),
        st.booleans(),
    ),
)


@given(st.lists(st.dictionaries(st.sampled_from("uvw"), OBJECTS, min_size=1), max_size=8))
def test_changes_of_some_pods_bring_what_a_view_of_all_would(steps):
    """Thousands of pods are not looked at because one has changed; two may claim one address meanwhile."""
    worlds = []
    for _ in range(2):
        registry = Registry()
        worlds.append((registry, Pods(Reconciler(registry, [EngineSource.PODS], lambda: 0.0))))
    (some, told_some), (whole, told_all) = worlds
    objects = {}
    for pods in (told_some, told_all):
        pods.view({})
    for step in steps:
        for name, one in step.items():
            objects.pop(name, None)
            if one is not None:
                objects[name] = one
        told_some.changed(step)
        told_all.view(objects)

        shown = [
            sorted((m.instance.address.authority, m.life.state, repr(m.origin.wanted)) for m in each.members())
            for each in (some, whole)
        ]
        assert shown[0] == shown[1]


def test_a_change_of_one_pod_leaves_the_others_alone():
    """However many there are."""
    registry = Registry()
    pods = Pods(Reconciler(registry, [EngineSource.PODS], lambda: 0.0))
    wanted = {f"u{n}": Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"u{n}") for n in range(300)}
    pods.view(wanted)
    origins = {member.instance.id: member.origin for member in registry.members()}
    pods.changed({"u7": replace(wanted["u7"], leaves=True), "u8": None})

    assert len(registry.members()) == 299
    assert [m.instance.address.host for m in registry.members() if m.life.state is HealthState.DRAINING] == ["h7"]
    assert sum(member.origin is not origins[member.instance.id] for member in registry.members()) == 1
