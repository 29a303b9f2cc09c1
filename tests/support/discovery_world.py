"""A router's discovery without its edge: a registry, and what speaks to it."""

import asyncio

from pdrelay_proxy.core.discovery.sources import MAX_ENGINES
from pdrelay_proxy.core.discovery.store_entries import (
    entry_name,
    entry_of,
)
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.core.steps import finish
from pdrelay_proxy.io.discovery.discovery import Discovery
from pdrelay_proxy.io.discovery.engine_changes import EngineChanges
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.entries import Entries
from pdrelay_proxy.io.discovery.memory import MemoryStore
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.io.discovery.store import replace_entry

A = Wanted(Role.PREFILL, Target.parse("a:80#revision=v1"), "uid-a")


B = Wanted(Role.DECODE, Target.parse("b:80#dp=2"), "uid-b")


class World:
    """A registry, and what speaks to it."""

    def __init__(self, *static, max_engines=MAX_ENGINES):
        self.now, self.hears = 0.0, True
        self.registry = Registry()
        for text in static:
            self.registry.add_target(Role.DECODE, Target.parse(text), now=0)
        self.reconciler = Reconciler(self.registry, [EngineSource.PODS, EngineSource.STORE], lambda: self.now)
        self.pods = EngineObjects(self.reconciler)
        self.entries = Entries(self.reconciler)
        finish(self.entries.view_in_steps({}))
        self.store = MemoryStore(self.entries, max_engines=max_engines)
        self.use(self.store)

    def use(self, store):
        """Have operators' changes go to this store."""
        self.changes = EngineChanges(self.registry, self.reconciler, self.entries, store)
        self.discovery = Discovery(self.reconciler, store, self.changes)

    def reconcile(self):
        for _ in self.reconciler.reconcile():
            pass

    def see(self, *pods):
        finish(self.pods.view_in_steps({f"uid-{number}": pod for number, pod in enumerate(pods)}))

    @property
    def there(self):
        return [(m.instance.id, m.instance.address.authority, m.life.state) for m in self.registry.members()]


def stored(numbers, role=Role.DECODE):
    """Return what a store has of some engines."""
    engines = [Wanted(role, Target.parse(f"h{number}:80")) for number in numbers]
    return {entry_name(one.key): entry_of(one) for one in engines}


D = Wanted(Role.DECODE, Target.parse("d:80"), "uid-d")


E = Wanted(Role.DECODE, Target.parse("e:80"), "uid-e")


PREFILL, DECODE, BOTH = EngineRole


def serving(world):
    return {member.instance.id: member.role for member in world.registry.members()}


async def turn_now(world, name, to, **more):
    await world.changes.change_role(name, to, force=True, **more)
    world.registry.settle(patience_s=60, now=world.now)


async def cut_off(world, taking_in):
    """Cancel the task that takes in engines when the first of them are there, and wait for its end."""
    task = asyncio.create_task(taking_in)
    while not world.registry.members():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


class CommonStore:
    """A store of two routers: what is put is in the views of both when it is acknowledged, which takes a while."""

    def __init__(self, *worlds):
        self.entries = {}
        self._worlds = worlds
        self.deaf = None  # the world that hears nothing, unless it asks for a change itself
        for world in worlds:
            world.use(self)

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
                finish(world.entries.view_in_steps(dict(self.entries)))
