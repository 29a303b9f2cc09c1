"""What choosing two engines costs must not grow with the fleet for each request, but for each change at most."""

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import RequestId, Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.policies.round_robin import RoundRobin
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet
from pdrelay_proxy.settings import Settings

SETTINGS = Settings(circuit_breaker_failures=1, ejection_time_s=5)
REST_S = 6.0  # after it, a broken engine waits for its trial


class CountingRegistry(Registry):
    """Counts how often an engine is looked up: what engines come down to takes a look at all of them."""

    def __init__(self, settings):
        super().__init__(settings)
        self.looks = 0
        self._found = self.get
        self.get = self.counted

    def counted(self, name):
        """Count, and return what is known of it."""
        self.looks += 1
        return self._found(name)


class World:
    """A fleet whose engines serve some models, with a clock of its own."""

    def __init__(self):
        self.now = 0.0
        self.registry = CountingRegistry(SETTINGS)
        self.pairs = PairSelector(self.registry, GroupChoice(RoundRobin()))
        self.fleet = LiveFleet(self.registry, self.pairs, PushCoordinates(at_once=True), lambda: self.now)

    def add(self, role, *models, **facts):
        """Add an engine that is well."""
        port = len(self.registry.members()) + 1
        found = EngineCapabilities(frozenset(models), **facts)
        one = self.registry.add(role, Address("http", "h", port), facts=found, now=self.now)
        self.registry.member(one.id).life.seen(now=self.now)
        return one

    def halves(self, count, *models, **facts):
        """Add so many engines, half of them of each role."""
        for role in Role:
            for _ in range(count // 2):
                self.add(role, *models, **facts)
        return self

    def wait_for_trial(self, one):
        """Have an engine be ejected, and rest for long enough."""
        life = self.registry.member(one.id).life
        life.failed(RequestId("f"), Failure.UNREACHABLE, now=self.now)
        self.now += REST_S
        assert one in self.fleet.usable(one.role)
        assert life.state is HealthState.HALF_OPEN
        return life

    def looks_of(self, asks):
        """Return how many looks at engines some requests cost."""
        before = self.registry.looks
        for ask in asks:
            self.fleet.any_pair(ask, may_be_alone=True)
        return self.registry.looks - before


A, B = RoutingHints("a"), RoutingHints("b")


@pytest.mark.parametrize("where", ["another model", "no partner"])
@pytest.mark.parametrize("role", Role)
def test_an_engine_that_waits_for_its_trial_in_vain_costs_other_requests_nothing(role, where):
    """No request may come for a quiet model, or for an engine without a partner: it can wait for days.

    While it did, each request sorted all engines into groups twice: 4 ms at 2,000 engines.
    """
    world = World().halves(1000, "a", version="1")
    sick = world.add(role, "b", version="1") if where == "another model" else world.add(role, "a", version="2")
    life = world.wait_for_trial(sick)

    assert world.looks_of([A] * 100) <= 10 * 1001
    assert world.looks_of([A] * 100) == 0
    assert life.state is HealthState.HALF_OPEN


def test_a_trial_that_takes_long_costs_other_requests_nothing():
    """It may be a stream of minutes, of the only model there is; what it shows counts at once."""
    world = World().halves(100, "a")
    sick = world.registry.known(Role.DECODE)[0]
    life = world.wait_for_trial(sick)
    request = RequestId("r")
    assert world.fleet.any_pair(A)[1] == sick
    world.fleet.enter(sick, request)
    world.fleet.any_pair(A)

    assert world.pairs.quick_pair(A, world.now) is not None
    assert sick not in {world.fleet.any_pair(A)[1] for _ in range(100)}
    world.fleet.all_answered(sick, (request,))
    assert life.state is HealthState.HEALTHY
    assert sick in {world.fleet.any_pair(A)[1] for _ in range(100)}


def test_the_next_request_for_the_model_is_the_trial():
    """What is remembered for others must not keep it from being tried."""
    world = World().halves(10, "a").halves(10, "b")
    sick = world.registry.known(Role.DECODE)[-1]
    world.looks_of([A, B] * 3)
    world.wait_for_trial(sick)
    world.looks_of([A] * 3)

    assert world.fleet.any_pair(B)[1] == sick
    assert sick not in {world.fleet.any_pair(B)[1] for _ in range(20)}


def test_adapters_in_turn_are_looked_at_once_for_each_change():
    """With more names than were remembered, all of them were forgotten at once, over and over again."""
    names = [f"lora-{n}" for n in range(200)]
    world = World().halves(100, *names)
    asks = [RoutingHints(name) for name in names]
    world.looks_of(asks)
    assert world.looks_of(asks * 3) == 0

    world.registry.departures.drain(world.registry.known(Role.DECODE)[0].id, now=0.0)
    assert world.looks_of(asks) <= 10 * 100
    assert world.looks_of(asks * 3) == 0
