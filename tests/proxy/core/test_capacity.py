"""How much more a fleet can take, as a gateway above several fleets sees it."""

import itertools

import pytest

from pdrelay_proxy.core.capacity import FRESH_S, Admitted, RoleCapacity, capacity_of
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.engine_metrics import ShownLoad, shown_load
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.settings import Settings

IDLE = Admitted(0, 0, 100)


class World:
    """A fleet, and what is asked of it."""

    def __init__(self, prefill=2, decode=2):
        self.registry = Registry(Settings(circuit_breaker_failures=1))
        for number, role in enumerate([Role.PREFILL] * prefill + [Role.DECODE] * decode):
            self.registry.add_target(role, Target.parse(f"h:{number + 1}"), now=0.0)
        for member in self.members(Role.DECODE):
            self.registry.learn(member.instance.id, EngineCapabilities(frozenset({"m", "lora"})))

    def members(self, role):
        return [member for member in self.registry.members() if member.instance.role is role]

    def eject(self, member):
        member.life.failed(RequestId("r"), Failure.UNREACHABLE, now=0.0)

    def now(self, admitted=IDLE, *, slots=None, is_ready=True, decode_alone=True, now=0.0):
        return capacity_of(self.registry, admitted, slots=slots, is_ready=is_ready, decode_alone=decode_alone, now=now)


def test_a_fleet_without_work_has_all_of_its_capacity():
    found = World().now(slots=10)

    assert (found.weight, found.can_serve, found.slots, found.free_slots) == (100, True, 20, 20)
    assert found.models == ["lora", "m"]


def test_what_is_not_known_is_not_invented():
    """Without decode_slots and without metrics of engines the router's own admission is what is left."""
    found = World().now(Admitted(20, 5, 100))

    assert (found.slots, found.free_slots, found.kv_room, found.weight) == (None, None, None, 75)


def test_engines_that_are_ejected_count_as_lost_and_those_that_are_drained_as_gone():
    """A rollout drains engines all the time, and their successors count."""
    world = World(4, 4)
    world.eject(world.members(Role.DECODE)[0])
    world.registry.drain(world.members(Role.PREFILL)[0].instance.id, now=0.0)
    found = world.now()

    assert (found.prefill, found.decode) == (RoleCapacity(3, 3), RoleCapacity(4, 3))
    assert found.weight == 75


def test_the_requests_that_engines_show_count_also_those_of_other_routers():
    world = World(1, 2)
    first, second = world.members(Role.DECODE)
    for number in range(4):
        first.load.enter(RequestId(str(number)))
    first.shown, second.shown = ShownLoad(0.0, 2, 0.5), ShownLoad(0.0, 30, 0.7)
    found = world.now(slots=10)

    assert (found.slots, found.free_slots) == (20, 6)  # more requests than slots are no negative room elsewhere
    assert found.kv_room == pytest.approx(0.4)
    assert found.weight == 30  # the slots are what is shortest


def test_what_engines_have_shown_long_ago_counts_no_more():
    world = World(1, 1)
    world.members(Role.DECODE)[0].shown = ShownLoad(0.0, 9, 0.9)

    assert world.now(slots=10, now=FRESH_S).free_slots == 1
    found = world.now(slots=10, now=FRESH_S + 0.1)
    assert (found.free_slots, found.kv_room) == (10, None)


def test_a_full_fleet_keeps_the_least_weight():
    """0 is what gateways take out: when all fleets are full, that would leave none."""
    assert World().now(Admitted(100, 50, 100)).weight == 1


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (World(), {"is_ready": False}),
        (World(2, 0), {}),
        (World(0, 2), {"decode_alone": False}),
    ],
)
def test_what_can_serve_nothing_has_no_weight(world, more):
    found = world.now(**more)

    assert (found.can_serve, found.weight) == (False, 0)


def test_weights_are_bounded():
    """Whatever is known, in any combination."""
    for lost, running, usage, slots in itertools.product((0, 1, 2), (0, 99, 10_000), (None, 0.0, 1.0), (None, 1, 50)):
        world = World(2, 2)
        for member in world.members(Role.DECODE)[:lost]:
            world.eject(member)
        for member in world.members(Role.DECODE):
            member.shown = ShownLoad(0.0, running, usage)
        found = world.now(Admitted(running, 0, 100), slots=slots)
        assert (found.weight == 0) is (lost == 2)
        assert 0 <= found.weight <= 100
        assert 0 <= found.utilization <= 1


METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 700.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 5e-1
"""


@pytest.mark.parametrize(
    ("rank", "load"), [(None, ShownLoad(7.0, 8, 0.5)), (0, ShownLoad(7.0, 4, 0.25)), (1, ShownLoad(7.0, 4, 0.5))]
)
def test_the_load_of_an_engine_is_read_in_its_metrics(rank, load):
    """Other metrics whose names begin alike do not count."""
    assert shown_load(METRICS, rank, now=7.0) == load


@pytest.mark.parametrize(
    "text", [b"", b"vllm:num_requests_running", b"\nvllm:num_requests_running nan\n", b"\nvllm:num_requests_running 1"]
)
def test_metrics_of_another_kind_show_nothing_or_what_there_is(text):
    found = shown_load(text, now=0.0)

    assert found in (None, ShownLoad(0.0, 1, None))
