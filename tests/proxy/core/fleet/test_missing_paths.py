"""Which engines have said that they have no such path."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.missing_paths import HOLDS_S, MissingPaths
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import ANY, RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.errors import PathNotServed

PATH = "/v1/embeddings"


class World:
    """Two decode engines of model a, one of model b, and a prefill engine."""

    def __init__(self):
        self.registry = Registry()
        self.missing = MissingPaths(self.registry)
        self.engines = [
            self.registry.add(role, Address("http", "h", port), facts=EngineCapabilities(models=frozenset({model})))
            for port, (role, model) in enumerate(
                [(Role.DECODE, "a"), (Role.DECODE, "a"), (Role.DECODE, "b"), (Role.PREFILL, "a")], start=1
            )
        ]

    def deny(self, *places, now=0.0):
        for place in places:
            self.missing.denied(PATH, self.engines[place].id, now=now)

    def is_shut(self, model="a", *, now=1.0, path=PATH):
        try:
            self.missing.check(path, RoutingHints(model), now=now)
        except PathNotServed:
            return True
        return False


def test_the_door_is_shut_when_each_engine_that_serves_the_model_has_said_it():
    """And for this model and this path alone."""
    world = World()
    assert PATH not in world.missing.denials
    world.deny(0)
    assert not world.is_shut()
    world.deny(1)

    assert world.is_shut()
    assert not world.is_shut("b")
    assert not world.is_shut(path="/v1/score")
    assert not world.is_shut("unknown")
    world.deny(2)
    with pytest.raises(PathNotServed, match=PATH):
        world.missing.check(PATH, ANY, now=1.0)


def test_another_engine_gets_what_one_has_not():
    """As long as there is one."""
    world = World()
    world.deny(0)

    assert world.missing.offering(PATH, world.engines, now=1) == world.engines[1:]
    assert world.missing.offering("/v1/score", world.engines, now=1) == world.engines


def restart(world):
    world.registry.member(world.engines[0].id).life.failed(RequestId("r"), Failure.UNREACHABLE, now=1)


def change(world):
    world.registry.learn(world.engines[0].id, EngineCapabilities(version="0.33"))


def add(world):
    world.registry.add(Role.DECODE, Address("http", "new", 9), facts=EngineCapabilities(models=frozenset({"a"})))


@pytest.mark.parametrize("event", [restart, change, add])
def test_it_is_forgotten_when_an_engine_restarts_changes_or_is_added(event):
    """It may have the path now."""
    world = World()
    world.deny(0, 1)
    assert world.is_shut()
    event(world)

    assert not world.is_shut()


def test_it_is_forgotten_after_a_while():
    """What said it may have been a mesh whose routes were not made yet."""
    world = World()
    world.deny(0, 1)

    assert world.is_shut(now=HOLDS_S - 1)
    assert not world.is_shut(now=HOLDS_S)
    assert PATH not in world.missing.denials


def test_engines_that_leave_do_not_keep_the_door_open():
    """They get nothing new."""
    world = World()
    world.deny(0)
    world.registry.departures.drain(world.engines[1].id, now=0)
    assert world.is_shut()
    world.registry.remove(world.engines[0].id, now=0)
    world.deny(0, 2)

    assert not world.is_shut()


def test_what_an_engine_has_served_a_moment_ago_it_has():
    """A mesh answers 404 while its routes are made anew: that must not shut the door to a path."""
    world = World()
    for place in (0, 1):
        world.missing.served(PATH, world.engines[place].id, now=0)
    world.deny(0, 1, now=HOLDS_S - 1)
    assert PATH not in world.missing.denials
    world.deny(0, 1, now=HOLDS_S)

    assert world.is_shut(now=HOLDS_S)


@pytest.mark.parametrize("event", [restart, change])
def test_an_engine_that_restarts_or_changes_may_have_lost_a_path(event):
    """It is believed at once."""
    world = World()
    for place in (0, 1):
        world.missing.served(PATH, world.engines[place].id, now=0)
    event(world)
    world.deny(0, 1)

    assert world.missing.offering(PATH, world.engines[:2], now=1) == world.engines[1:2]


def test_no_more_is_kept_of_what_was_served_than_there_are_engines():
    """Pods come and go for months."""
    world = World()
    for port in range(100, 200):
        one = world.registry.add(Role.DECODE, Address("http", "h", port))
        world.missing.served(PATH, one.id, now=0)
        world.registry.remove(one.id, now=0)

    assert sum(map(len, world.missing._served.values())) <= 1
