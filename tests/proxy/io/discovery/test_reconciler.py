"""What the sources say becomes what the router has, whichever of them speaks, and in whatever order."""

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.discovery.reconcile import (
    MOST,
    Assignment,
    assignment_name,
    assignment_of,
    entry_name,
    entry_of,
    read_entry,
)
from pdrelay_proxy.core.discovery.unnamed_assignments import GRACE_S
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Key, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.errors import AddressError, AlreadyKnown, CannotTurn, UnknownInstance
from pdrelay_proxy.io.discovery.memory import MemoryStore
from pdrelay_proxy.io.discovery.reconciler import Discovery, Entries, NotManagedHere, Pods, Reconciler
from pdrelay_proxy.io.discovery.store import StoreDown, replace_entry

A = Wanted(Role.PREFILL, Target.parse("a:80#revision=v1"), "uid-a")
B = Wanted(Role.DECODE, Target.parse("b:80#dp=2"), "uid-b")


class World:
    """A registry, and what speaks to it."""

    def __init__(self, *static, most=MOST):
        self.now, self.hears = 0.0, True
        self.registry = Registry()
        for text in static:
            self.registry.add_target(Role.DECODE, Target.parse(text), now=0)
        self.reconciler = Reconciler(self.registry, [EngineSource.PODS, EngineSource.STORE], lambda: self.now)
        self.pods = Pods(self.reconciler)
        self.entries = Entries(self.reconciler)
        self.entries.view({})
        self.store = MemoryStore(self.entries, most=most)
        self.discovery = Discovery(self.registry, self.reconciler, self.entries, self.store)

    def reconcile(self):
        for _ in self.reconciler.reconcile():
            pass

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
    world.registry.departures.retire(world.registry.members()[0].instance.id, now=1)
    world.reconcile()

    assert world.there == [("prefill-0", "a:80", HealthState.DRAINING), ("prefill-1", "a:80", HealthState.STARTING)]


async def test_what_an_operator_does_to_a_pod_is_not_undone():
    """Only what discovery drained it takes back into use."""
    world = World()
    world.see(A)
    await world.discovery.drain("prefill-0")
    world.see(A, B)
    world.reconcile()
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
    assert not world.registry.departures.moving
    await world.discovery.drain("decode-0", moves=True)
    other = World()
    other.reconciler.view(EngineSource.STORE, [replace(wanted_of(world), leaves=False)])
    other.reconciler.view(EngineSource.STORE, [wanted_of(world)])

    assert list(world.registry.departures.moving) == list(other.registry.departures.moving) == ["decode-0"]
    await world.discovery.undrain("decode-0")
    other.reconciler.view(EngineSource.STORE, [wanted_of(world)])
    assert not world.registry.departures.moving
    assert not other.registry.departures.moving


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


def test_that_engines_are_left_out_is_said_once_and_they_come_when_there_is_room(caplog):
    """An engine that serves nothing, of which no line tells, is looked for in vain."""
    world = World()
    leaving = {str(n): f'{{"role":"decode","target":"h{n}:80","leaves":true}}' for n in range(MOST)}
    world.entries.view(leaving)
    for _ in range(2):
        world.entries.view({**leaving, "a": entry_of(A)})
    assert world.there == []

    del leaving["7"]
    world.entries.view({**leaving, "a": entry_of(A)})
    assert [name for name, *_ in world.there] == ["prefill-0"]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said == ["store: there are more than 50000 engines: 1 left out until others have gone"]


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
    follower, entries = World(), {}
    for step in steps:
        entries = {name: text for name in "uvw" if (text := step.get(name, entries.get(name))) is not None}
        follower.entries.view(dict(entries))
        late = World()
        late.entries.view(dict(entries))

        assert follower.reconciler.assignments == late.reconciler.assignments
        wanted = [each.reconciler.sources.views[EngineSource.STORE].engines for each in (follower, late)]
        assert wanted[0].keys() == wanted[1].keys()
        assert {key: one.leaves for key, one in wanted[0].items()} == {
            key: one.leaves for key, one in wanted[1].items()
        }


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
    world, most = World(), 20
    pods = {f"u{n}": Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"u{n}") for n in range(1000)}
    counts, synced = [0], list[bool]()
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


def stored(numbers, role=Role.DECODE):
    """Return what a store has of some engines."""
    engines = [Wanted(role, Target.parse(f"h{number}:80")) for number in numbers]
    return {entry_name(one.key): entry_of(one) for one in engines}


def test_a_view_of_a_store_is_taken_in_steps_and_heard_when_they_are_done():
    """The first one of 2,000 entries kept every stream waiting for 290 ms; what has turned is so from the beginning."""
    registry = Registry()
    registry.add_target(Role.DECODE, Target.parse("static:80"), now=0)
    reconciler = Reconciler(registry, [EngineSource.STORE], lambda: 0.0)
    entries, counts, synced = Entries(reconciler), [1], list[bool]()
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
    world, names = World(), list[set[str]]()
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
    task = asyncio.create_task(world.entries.receive(stored(range(300))))
    while not world.registry.members():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()
    assert len(world.registry.members()) == 300


def test_an_entry_that_is_renamed_takes_no_engine_out():
    """However many others change in the same view: the steps go by place, not by name."""
    world = World()
    world.entries.view({"old": entry_of(B), **stored(range(300))})
    before = world.registry.members()[:2]
    world.entries.view({**stored(range(300, 600)), "new": entry_of(B)})

    assert [member.instance.id for member in before] == ["decode-0", "decode-1"]
    assert [world.registry.get(member.instance.id) for member in before] == [*before]


def test_an_assignment_costs_a_look_at_its_engine_alone():
    """Each one cost a look at all of 2,000 engines, in one step of 8 ms."""
    world = World()
    world.entries.view(stored(range(300)))
    turn = Assignment(Key(Role.DECODE, "h7:80"), EngineRole.PREFILL)
    world.entries.view({**stored(range(300)), assignment_name(turn.key): assignment_of(turn)})
    assert [m.instance.id for m in world.registry.members() if m.heading is EngineRole.PREFILL] == ["decode-7"]

    world.entries.view(stored(range(300)))
    assert [m.instance.id for m in world.registry.members() if m.heading is EngineRole.PREFILL] == []


@pytest.mark.parametrize("kind", ["pods", "store"])
def test_engines_that_go_do_so_before_others_take_their_addresses(kind):
    """A view in steps must not find an address taken by an engine that the same view takes away."""
    world = World()
    if kind == "pods":
        world.pods.view({f"u{n}": Wanted(Role.DECODE, Target.parse(f"h{n}:80"), f"u{n}") for n in range(300)})
        world.pods.view({f"v{n}": Wanted(Role.PREFILL, Target.parse(f"h{n}:80"), f"v{n}") for n in range(300)})
    else:
        world.entries.view(stored(range(300)))
        world.entries.view(stored(range(300), Role.PREFILL))

    assert {member.instance.role for member in world.registry.members()} == {Role.PREFILL}
    assert len(world.registry.members()) == 300


# ---- turns: a store says what an engine serves in place of what its source says

D = Wanted(Role.DECODE, Target.parse("d:80"), "uid-d")
E = Wanted(Role.DECODE, Target.parse("e:80"), "uid-e")
PREFILL, DECODE, BOTH = EngineRole


def serving(world):
    return {member.instance.id: member.role for member in world.registry.members()}


async def turn_now(world, name, to, **more):
    await world.discovery.change_role(name, to, force=True, **more)
    world.registry.settle(patience_s=60, now=world.now)


@pytest.mark.parametrize("kind", ["settings", "pod", "store"])
async def test_a_source_that_says_the_same_again_does_not_undo_a_turn(kind):
    """Whatever it is; a look at everything neither."""
    world = World(*(["d:80", "e:80"] if kind == "settings" else []))
    if kind == "pod":
        world.see(D, E)
    elif kind == "store":
        for wanted in (D, E):
            await world.discovery.add(wanted.role, wanted.target)
    await turn_now(world, "decode-0", PREFILL)
    for pods in ((E, D), (D, E)) if kind == "pod" else ((), ()):
        world.see(*pods)
    world.reconcile()

    assert serving(world) == {"decode-0": PREFILL, "decode-1": DECODE}
    await turn_now(world, "decode-0", DECODE)
    world.registry.settle(patience_s=0, now=1)
    assert serving(world) == {"decode-0": DECODE, "decode-1": DECODE}
    assert not world.reconciler.assignments


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
    late.entries.view(dict(world.store._entries))
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

    assert [key.authority for key in world.reconciler.assignments] == ["a:80"]


async def turns_beside_an_assignment(*, pods, age_s=0.0):
    """Return whose assignments are left when a router that has just started turns an engine; one was of pod D."""
    world = World()
    world.see(D, E)
    await turn_now(world, "decode-0", PREFILL)
    late = World()
    late.store._entries |= world.store._entries
    late.entries.view(dict(world.store._entries))
    late.see(*pods, E, A)
    late.now = age_s
    await late.discovery.change_role("prefill-0", BOTH)
    return sorted(key.authority for key in late.reconciler.assignments)


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
    await world.discovery.change_role("decode-0", PREFILL)
    world.see(replace(D, leaves=True), E)
    world.see(D, E)
    world.registry.settle(patience_s=60, now=1)

    assert serving(world) == {"decode-0": PREFILL, "decode-1": DECODE}
    assert world.there[0][2] is HealthState.STARTING


def test_streams_move_from_a_pod_that_is_deleted():
    """Also if it was not ready before."""
    world = World()
    world.see(D, E)
    world.see(replace(D, leaves=True), E)
    assert not world.registry.departures.moving
    world.see(replace(D, leaves=True, moves=True), E)

    assert list(world.registry.departures.moving) == ["decode-0"]


async def test_a_router_that_starts_serves_what_the_store_says_at_once():
    """It has nothing at any engine, so there is nothing to wait for; engines that come later do as well."""
    world = World("d:80", "e:80")
    await turn_now(world, "decode-0", PREFILL)
    told = dict(world.store._entries)
    late = World("d:80", "e:80")
    late.reconciler = Reconciler(late.registry, [EngineSource.STORE], lambda: 0.0)
    Entries(late.reconciler).view(told)
    assert serving(late) == {"decode-0": PREFILL, "decode-1": DECODE}
    found = World("e:80")
    found.entries.view(told)
    found.see(D)

    assert serving(found) == {"decode-0": DECODE, "decode-1": PREFILL}
    assert not found.registry.departures.moving
    assert [late.registry.departures.turns, found.registry.departures.turns] == [{}, {}]


async def test_two_routers_of_one_store_agree():
    """Each has its own requests at the engine, and turns when they are over."""
    world, other = World("d:80", "e:80"), World("d:80", "e:80")
    other.registry.member("decode-0").load.enter("r")
    await turn_now(world, "decode-0", PREFILL)
    other.entries.view(dict(world.store._entries))
    other.registry.settle(patience_s=60, now=1)
    assert (serving(world)["decode-0"], serving(other)["decode-0"]) == (PREFILL, DECODE)
    other.registry.member("decode-0").load.leave("r")
    other.registry.settle(patience_s=60, now=2)
    assert serving(other) == serving(world)
    await world.discovery.change_role("decode-0", DECODE, force=True)
    await world.discovery.undrain("decode-0")
    other.entries.view(dict(world.store._entries))

    assert serving(other) == serving(world) == {"decode-0": PREFILL, "decode-1": DECODE}
    assert all(member.turn is None for member in other.registry.members())


class SharedStore:
    """A store of two routers: what is put is in the views of both when it is acknowledged, which takes a while."""

    def __init__(self, *worlds):
        self.entries, self._worlds = {}, worlds
        self.deaf = None  # the world that hears nothing, unless it asks for a change itself
        for world in worlds:
            world.discovery = Discovery(world.registry, world.reconciler, world.entries, self)

    async def put(self, name, text, /):
        await asyncio.sleep(0)
        self.entries[name] = text
        self.tell()

    async def delete(self, name, /):
        await asyncio.sleep(0)
        self.entries.pop(name, None)
        self.tell()

    async def replace(self, name, before, after, /):
        await asyncio.sleep(0)
        replace_entry(self.entries, name, before, after)
        is_done = self.entries.get(name) == after
        self.deaf = self.deaf if is_done else None  # who was late is told
        self.tell()
        return is_done

    def tell(self):
        for world in self._worlds:
            if world is not self.deaf:
                world.entries.view(dict(self.entries))


ORDERS = {
    "remove": lambda discovery, name: discovery.remove(name),
    "drain": lambda discovery, name: discovery.drain(name),
    "undrain": lambda discovery, name: discovery.undrain(name),
}


@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_is_for_the_engine_of_its_id_and_not_for_the_next_one_at_its_address(order):
    """Another router has removed it and added a new one, and this one has not heard of it yet."""
    world, other = World(), World()
    store = SharedStore(world, other)
    await world.discovery.add(Role.DECODE, Target.parse("d:80"))
    if order == "undrain":
        await world.discovery.drain("decode-0")
    store.deaf = world
    await other.discovery.remove("decode-0")
    await other.discovery.add(Role.DECODE, Target.parse("d:80"))
    before = dict(store.entries)
    with pytest.raises(UnknownInstance, match="decode-0 is gone"):
        await ORDERS[order](world.discovery, "decode-0")

    assert store.entries == before
    assert world.there == other.there == [("decode-1", "d:80", HealthState.STARTING)]


async def test_an_engine_that_still_has_streams_is_not_confused_with_the_next_one_at_its_address():
    """Its id is known for as long as they last: whoever removes it again means it."""
    world = World()
    await world.discovery.add(Role.DECODE, Target.parse("d:80"))
    world.registry.member("decode-0").load.enter("r")
    await world.discovery.remove("decode-0")
    await world.discovery.add(Role.DECODE, Target.parse("d:80"))
    with pytest.raises(UnknownInstance, match="decode-0"):
        await world.discovery.remove("decode-0")

    assert [name for name, _, state in world.there if state is HealthState.STARTING] == ["decode-1"]


async def test_an_engine_that_is_added_anew_between_two_views_is_another_one():
    """A router that polls sees no removal: it would keep what it knows of the one before."""
    world, other = World(), World()
    store = SharedStore(world, other)
    await world.discovery.add(Role.DECODE, Target.parse("d:80"))
    store.deaf = other
    await world.discovery.remove("decode-0")
    await world.discovery.add(Role.DECODE, Target.parse("d:80"))
    store.deaf = None
    store.tell()

    assert [name for name, _, state in other.there if state is HealthState.STARTING] == ["decode-1"]


async def test_of_routers_that_give_the_same_order_none_is_refused():
    """It is as it was wanted, whoever was first."""
    worlds = [World() for _ in range(3)]
    store = SharedStore(*worlds)
    await worlds[0].discovery.add(Role.DECODE, Target.parse("d:80"))
    await asyncio.gather(*[world.discovery.drain("decode-0") for world in worlds])
    await asyncio.gather(*[world.discovery.remove("decode-0") for world in worlds])

    assert store.entries == {}


async def test_an_order_does_not_undo_what_another_router_has_written():
    """One drains it, and one drains it by moving its streams: both hold."""
    world, other = World(), World()
    store = SharedStore(world, other)
    await world.discovery.add(Role.DECODE, Target.parse("d:80"))
    await asyncio.gather(world.discovery.drain("decode-0", moves=True), other.discovery.drain("decode-0"))
    (text,) = store.entries.values()

    assert (read_entry(text).leaves, read_entry(text).moves) == (True, True)


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("is_idle", [True, False])
async def test_of_turns_that_begin_at_the_same_moment_none_takes_the_last_engine_of_a_role(routers, is_idle):
    """Whichever router is asked for which: each saw the other's engine as the one that stays."""
    worlds = [World("d:80", "e:80") for _ in range(routers)]
    store = SharedStore(*worlds)
    for world in worlds:
        world.see(A)
        if not is_idle:
            world.registry.member("decode-0").load.enter("r")
    asked = [
        worlds[0].discovery.change_role("decode-0", PREFILL),
        worlds[-1].discovery.change_role("decode-1", PREFILL),
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
    SharedStore(world)
    world.see(A)
    await world.discovery.change_role("decode-0", BOTH)
    first = asyncio.create_task(world.discovery.change_role("decode-1", PREFILL, force=True))
    await asyncio.sleep(0)  # it waits for the store
    with pytest.raises(CannotTurn, match="decode-0 is the last decode engine"):
        await world.discovery.change_role("decode-0", PREFILL)
    await first
    assert [member.heading for member in world.registry.members()] == [BOTH, PREFILL, PREFILL]
    await world.discovery.change_role("decode-0", PREFILL, force=True)

    assert [member.heading for member in world.registry.members()] == [PREFILL, PREFILL, PREFILL]


async def test_an_engine_that_is_removed_leaves_no_assignment():
    """If it is added again, it serves what is said then."""
    world = World("e:80")
    await world.discovery.add(D.role, D.target)
    await turn_now(world, "decode-1", PREFILL)
    await world.discovery.remove("decode-1")
    assert not world.store._entries
    await world.discovery.add(D.role, D.target)

    assert serving(world) == {"decode-0": DECODE, "decode-2": DECODE}


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

    await world.discovery.add(Role.DECODE, Target.parse("d:80"))
    await look(world, seconds=5)

    assert serving(world)["decode-2"] is DECODE
    assert not world.reconciler.assignments


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

    assert [one.is_unnamed for one in world.reconciler.assignments.values()] == [False]


async def test_a_turn_that_is_made_while_doubts_are_written_stands():
    """They are written one after the other, and a store may take its time for each."""
    world = World("a:80", "d:80", "e:80")
    world.see()
    for name in ("decode-0", "decode-1"):
        await turn_now(world, name, PREFILL)
        world.registry.remove(name, now=1)
    first, second = world.reconciler.assignments
    put, written = world.store.put, []

    async def slow(name, text):
        await put(name, text)
        written.append(name)
        if len(written) == 1:
            await put(assignment_name(second), assignment_of(Assignment(second, BOTH)))

    world.store.put = slow
    await world.discovery.drop_unnamed_assignments()

    assert written == [assignment_name(first)]
    assert world.reconciler.assignments[second] == Assignment(second, BOTH)


@pytest.mark.parametrize("kind", ["settings", "pod"])
async def test_what_an_engine_serves_is_kept_for_another_router_that_names_it(kind):
    """A rollout of settings takes its time, and routers of one store may have different pods."""
    here, other = World("e:80", *["d:80"] * (kind == "settings")), World("e:80")
    store = SharedStore(here, other)
    here.see(*[D] * (kind == "pod"))
    other.see()
    store.tell()
    await turn_now(here, "decode-1", PREFILL)
    writes, put = [], store.put

    async def counted(name, text):
        writes.append(text)
        await put(name, text)

    store.put = counted
    await look(here, other, seconds=590)
    assert [one.is_unnamed for one in here.reconciler.assignments.values()] == [False]
    assert len(writes) == 2  # one has doubted it, the other has spoken for it

    await look(other, seconds=GRACE_S + 30)  # the one that names it is gone
    assert not store.entries


async def test_an_engine_that_cannot_turn_leaves_nothing_in_the_store():
    """The other routers must not hear of it."""
    world = World("d:80", "b:80#dp=2")
    with pytest.raises(CannotTurn, match="rank 0"):
        await world.discovery.change_role("decode-1", PREFILL)
    world.see(A)
    with pytest.raises(CannotTurn, match="prefill-0 is the last"):
        await world.discovery.change_role("prefill-0", DECODE)

    assert not world.store._entries


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
    world.entries.view({"turn.decode.d_3a80": text})

    assert serving(world) == {"decode-0": DECODE, "decode-1": DECODE}
    assert "left out: entry turn.decode.d_3a80" in caplog.text
