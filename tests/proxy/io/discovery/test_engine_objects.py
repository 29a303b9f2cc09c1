"""Objects of a source become engines; two may claim one address, and one may be no engine."""

import logging
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.discovery.store_entries import (
    entry_name,
    entry_of,
)
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Target, Wanted
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from support.discovery_world import A, B, World, cut_off


def test_nonsense_is_left_out_and_said_once(caplog):
    """One bad label, or one entry that somebody edited, does not take the others with it."""
    caplog.set_level(logging.WARNING)
    world = World()
    for _ in range(3):
        world.see(A, AddressError("pod x has no container port named http"), None)
        finish(world.entries.view_in_steps({entry_name(B.key): entry_of(B), "decode.y": "{}"}))

    assert [name for name, *_ in world.there] == ["prefill-0", "decode-0", "decode-1"]
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0:2] for line in said if "pod x" in line] == [
        ["left out", " pod x has no container port named http"]
    ]
    assert sum("entry decode.y" in line for line in said) == 1


def test_a_bad_pod_that_changes_is_said_once(caplog):
    """The kubelet writes its status again and again."""
    caplog.set_level(logging.WARNING)
    world = World()
    world.see(A)
    for text in ("no port", "no port", "no port", "no role", "no role"):
        world.pods.changed({"x": AddressError(text)})

    assert [record.getMessage() for record in caplog.records] == ["left out: no port", "left out: no role"]
    world.pods.changed({"x": AddressError("'" + "x" * 200_000 + "' is no mode")})
    assert len(caplog.records[-1].getMessage()) < 1100


async def test_a_view_of_pods_whose_task_is_cancelled_is_taken_in_as_a_whole():
    """Their pool selects others: until those are listed, which an API that is away does not do, these stay."""
    world = World()
    pods = {f"uid-{n}": Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"uid-{n}") for n in range(300)}
    await cut_off(world, world.pods.receive(pods))

    assert len(world.registry.members()) == 300


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
        worlds.append((registry, EngineObjects(Reconciler(registry, [EngineSource.PODS], lambda: 0.0))))
    (some, told_some), (whole, told_all) = worlds
    objects = {}
    for pods in (told_some, told_all):
        finish(pods.view_in_steps({}))
    for step in steps:
        for name, one in step.items():
            objects.pop(name, None)
            if one is not None:
                objects[name] = one
        told_some.changed(step)
        finish(told_all.view_in_steps(objects))

        shown = [
            sorted((m.instance.address.authority, m.life.state, repr(m.origin.wanted)) for m in each.members())
            for each in (some, whole)
        ]
        assert shown[0] == shown[1]


def test_a_change_of_one_pod_leaves_the_others_alone():
    """However many there are."""
    registry = Registry()
    pods = EngineObjects(Reconciler(registry, [EngineSource.PODS], lambda: 0.0))
    wanted = {f"u{n}": Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"u{n}") for n in range(300)}
    finish(pods.view_in_steps(wanted))
    origins = {member.instance.id: member.origin for member in registry.members()}
    pods.changed({"u7": replace(wanted["u7"], leaves=True), "u8": None})

    assert len(registry.members()) == 299
    assert [m.instance.address.host for m in registry.members() if m.life.state is HealthState.DRAINING] == ["h7"]
    assert sum(member.origin is not origins[member.instance.id] for member in registry.members()) == 1
