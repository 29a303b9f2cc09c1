"""``GET /capacity``, as gateways and DNS health checks ask for it."""

import asyncio
from dataclasses import replace

import pytest

from support.sim import router, sims
from xpyd_proxy.api.capacity import CapacityMeter
from xpyd_proxy.core.admission.lifetime import Lifetime, Step
from xpyd_proxy.core.fleet.registry import Registry
from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.workers.reports import EMPTY, Counts, Whole, WorkerReport
from xpyd_proxy.settings import Settings


def report(admitted, waiting):
    return WorkerReport(0, 1, Counts(), EMPTY, {}, waiting, admitted, {}, {})


class World:
    """What the meter reads."""

    missing = ()

    def __init__(self):
        self.clock, self.asked, self.admitted = 0.0, 0, 10
        self.settings = Settings(max_concurrency=100)
        self.registry, self.lifetime = Registry(), Lifetime()
        for number, role in enumerate(Role):
            self.registry.add_target(role, Target.parse(f"h:{number + 1}"), now=0.0)
        self.meter = CapacityMeter(
            self.registry,
            self,
            self.lifetime,
            lambda: self.settings,
            everybody=self.everybody,
            clock=lambda: self.clock,
        )

    async def everybody(self):
        self.asked += 1
        await asyncio.sleep(0)
        return Whole(report(self.admitted, 0), [report(20, 3)], 2)


async def test_all_workers_count_and_are_asked_once_a_second_at_most():
    """However many ask, and however often."""
    world = World()
    first = await asyncio.gather(*(world.meter.now() for _ in range(50)))
    world.admitted, world.clock = 50, 0.9
    same = await world.meter.now()
    world.clock = 1.0

    assert {found.weight for found in (*first, same)} == {67}
    assert world.asked == 1
    assert (await world.meter.now()).weight == 27


async def test_a_router_that_ends_says_so_at_once():
    """What was found a moment ago does not keep it in a gateway's rotation."""
    world = World()
    before = await world.meter.now()
    world.lifetime.on(Step.TOLD)

    assert (before.weight, (await world.meter.now()).weight) == (67, 0)


async def test_a_gateway_gets_numbers_a_status_and_an_orca_report():
    settings = Settings(decode_slots=64, health_check_interval_s=0.0)
    async with router(sims(1, 2), settings) as client:
        response = await client.get("/capacity")

    assert response.status_code == 200
    assert response.json() == {
        "weight": 100,
        "can_serve": True,
        "serving_share": 1.0,
        "prefill": {"engines": 1, "serving": 1},
        "decode": {"engines": 2, "serving": 2},
        "decode_slots": 128,
        "free_decode_slots": 128,
        "kv_room": response.json()["kv_room"],  # the simulated engines may have been asked by now
        "requests_running": 0,
        "requests_waiting": 0,
        "max_concurrency": 4096,
        "models": response.json()["models"],
    }
    report = response.headers["endpoint-load-metrics"]
    assert report.startswith("TEXT application_utilization=0.0000, named_metrics.weight=100, ")
    assert "named_metrics.free_decode_slots=128" in report
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(("least", "status"), [("", 503), ("?least=0", 200), ("?least=101", 400), ("?least=x", 400)])
async def test_a_health_check_that_knows_statuses_alone_can_ask_for_a_least_weight(least, status):
    """Without engines the weight is 0."""
    async with router({}) as client:
        assert (await client.get(f"/capacity{least}")).status_code == status


async def test_who_may_read_the_metrics_may_read_it(tmp_path):
    (tmp_path / "keys").write_text("gateway:secret-of-the-gateway\n")
    settings = Settings(api_keys_file=str(tmp_path / "keys"), health_check_interval_s=0.0)
    async with router(sims(), settings) as client:
        bare = await client.get("/capacity")
        keyed = await client.get("/capacity", headers={"authorization": "Bearer secret-of-the-gateway"})
    async with router(sims(), replace(settings, public_metrics=True)) as client:
        public = await client.get("/capacity")

    assert [one.status_code for one in (bare, keyed, public)] == [401, 200, 200]
