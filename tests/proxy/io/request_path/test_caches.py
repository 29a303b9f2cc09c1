"""What engines have of a prompt, by what was sent and by what a feature hears of them; and for how long that holds."""

import json

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import ChangeCount
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role, RoutingHints
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.routing.cache_reports import CacheReports, PromptReports
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.io.request_path.caches import SENT
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.settings import PolicyName, Settings

if hasattr(CacheReports, "__mypyc_attrs__"):
    pytest.skip("a class of Python cannot extend a compiled one", allow_module_level=True)
TEXT = "once upon a time there was a river, " * 40


def hints():
    return RoutingHints(prompt=json.dumps([{"role": "user", "content": TEXT}]).encode())


SIZE = hints().blocks.size


class Told(CacheReports):
    """Engines that tell what a test says, of any prompt."""

    def __init__(self, **reports):
        super().__init__(ChangeCount())
        self.reports = reports
        self.asked = 0

    def of(self, hints, /):
        return ToldOfOne(self)


class ToldOfOne(PromptReports):
    def __init__(self, told):
        self.told = told

    def report(self, engine, /):
        self.told.asked += 1
        return self.told.reports.get(engine.instance.id.replace("-", "_"))


class World:
    """Two prefill and two decode engines."""

    def __init__(self, reports=None):
        self.now = 100.0
        settings = Settings(prefill_policy=PolicyName.PREFIX, decode_policy=PolicyName.PREFIX)
        registry = Registry(settings)
        for role in Role:
            for port in (1, 2):
                registry.add(role, Address("http", role.value, port))
        learned = PushCoordinates(at_once=True)
        self.fleet = fleet_of(
            settings, registry, learned, lambda: self.now, lambda _: 0, added=(RoutingParts(reports),)
        )  # fmt: skip
        self.caches = self.fleet.caches

    def engine(self, role, place=0):
        return self.fleet.known(role)[place]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_was_found_for_a_request_holds_until_another_one_is_sent(role):
    """Its engines are chosen in several steps, and each engine is looked up once."""
    told = Told()
    world = World(told)
    ask = hints()
    engine = world.engine(role)
    assert [world.caches.matched(engine, ask) for _ in range(3)] == [0, 0, 0]
    assert told.asked == 1

    world.caches.sent(engine, hints())

    assert world.caches.matched(engine, ask) == SIZE
    assert told.asked == 2


def test_what_other_engines_have_holds_when_a_request_is_sent_to_one():
    """Its other engine is chosen next."""
    told = Told()
    world = World(told)
    ask = hints()
    engines = world.fleet.known(Role.PREFILL)
    assert world.caches.matches(engines, ask) == [0, 0]

    world.caches.sent(engines[0], ask)

    assert world.caches.matches(engines, ask) == [SIZE, 0]
    assert told.asked == 3


def test_what_was_found_for_a_request_ends_when_an_engine_loses_its_cache():
    """A leg that cannot reach its engine shows it: it may come back as another process."""
    world = World()
    ask = hints()
    engine = world.engine(Role.DECODE)
    world.caches.sent(engine, ask)
    assert world.caches.matched(engine, ask) > 0

    world.now += 0.001
    world.fleet.ended(engine, "r", Failure.UNREACHABLE)

    assert world.caches.matched(engine, ask) == 0


def test_what_was_found_for_a_request_ends_with_time_and_with_a_report():
    """What is on its way counts for five seconds, what was sent has a lifetime, and engines evict."""
    told = Told()
    world = World(told)
    ask = hints()
    engine = world.engine(Role.PREFILL)
    world.caches.matched(engine, ask)
    world.now += 0.2
    world.caches.matched(engine, ask)
    assert told.asked == 2

    told.changes.count += 1
    world.caches.matched(engine, ask)

    assert told.asked == 3


def test_a_request_that_is_sent_again_has_the_same_prompt():
    """What was found of it holds, if nothing has changed."""
    told = Told()
    world = World(told)
    ask = hints()
    engine = world.engine(Role.DECODE)
    world.caches.matched(engine, ask)
    world.caches.matched(engine, ask.once_more())

    assert told.asked == 1


def test_a_report_counts_more_than_what_was_sent():
    """An engine that has evicted a prompt has it no more; how far it goes on behind what it tells, was sent."""
    nothing = (0, 0, "told")
    some = (100, 100, "told")
    part = (100, 300, "both")
    world = World(Told(prefill_0=nothing, decode_0=some, decode_1=part))
    ask = hints()
    engines = [world.engine(role, place) for role in Role for place in (0, 1)]
    for engine in engines:
        world.caches.sent(engine, ask)
        world.caches.arrived(engine, ask)
    world.now += 10

    assert world.caches.matches(engines, ask, is_there=True) == [0, SIZE, 100, 300]
    sources = world.caches.sources_by_engine(ask)
    assert [sources[engine.id] for engine in engines] == ["told", SENT, "told", "both"]


def test_what_is_on_its_way_counts_beside_a_report():
    """The engine tells of it once it has computed it."""
    world = World(Told(prefill_0=(0, 0, "told")))
    ask = hints()
    engine = world.engine(Role.PREFILL)
    world.caches.sent(engine, ask)

    assert world.caches.matched(engine, ask) == SIZE
    assert world.caches.matched(engine, ask, is_there=True) == 0
