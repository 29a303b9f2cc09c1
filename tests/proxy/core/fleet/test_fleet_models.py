"""What is said of the models of a fleet; what requests get of that is in requests/test_models.py."""

import time

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.settings import Settings


def serving(registry, engine, *adapters):
    names = frozenset(adapters)
    registry.learn(engine.id, EngineCapabilities(models=names | {"base"}, adapters=names))


def test_who_asks_for_a_wrong_model_again_and_again_takes_no_time_from_others():
    """To list those of 100 engines with 1,000 adapters each took 5 ms for each such request."""
    registry = Registry(Settings())
    for number in range(100):
        serving(registry, registry.add(Role.DECODE, Address("http", f"d{number}", 80)), *map(str, range(1000)))
    began = time.process_time()

    for _ in range(300):
        assert registry.models.listed().startswith("base, 0, 1, 10, ")

    assert time.process_time() - began < 0.5


def test_the_models_that_are_named_are_those_of_now():
    """An adapter may come and go."""
    registry = Registry(Settings())
    engine = registry.add(Role.DECODE, Address("http", "d0", 80))
    said = [registry.models.listed()]
    for adapters in (("b", "a"), (), ("c",)):
        serving(registry, engine, *adapters)
        said.append(registry.models.listed())
    registry.remove(engine.id, now=0.0)

    assert [*said, registry.models.listed()] == ["none", "base, a, b", "base", "base, c", "none"]
