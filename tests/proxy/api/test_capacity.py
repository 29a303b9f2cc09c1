"""``GET /capacity``, as gateways and DNS health checks ask for it."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from pdrelay_proxy.api.capacity import CapacityMeter
from pdrelay_proxy.core.admission.admission import Admission
from pdrelay_proxy.core.admission.lifetime import Lifetime, Step
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.workers.limit_shares import share_of
from pdrelay_proxy.core.workers.reports import EMPTY, Counts, Whole, WorkerReport
from pdrelay_proxy.io.request_path.telemetry import Telemetry
from pdrelay_proxy.io.workers.context import WorkerContext
from pdrelay_proxy.io.workers.group import SingleWorker
from pdrelay_proxy.io.workers.reports import WorkerReports
from pdrelay_proxy.settings import Settings
from support.sim import router, sims

pytestmark = pytest.mark.edges


def report(admitted, waiting, most):
    return WorkerReport(0, 1, Counts(), EMPTY, {}, waiting, admitted, most, {}, {})


class World:
    """What the meter reads."""

    missing = ()

    def __init__(self, everybody=None):
        self.clock, self.asked, self.admitted, self.everybody = 0.0, 0, 10, everybody or self.two
        self.settings = Settings(max_concurrency=50)  # the share of one of two workers
        self.registry, self.lifetime = Registry(), Lifetime()
        for number, role in enumerate(Role):
            self.registry.add_target(role, Target.parse(f"h:{number + 1}"), now=0.0)
        self.meter = CapacityMeter(
            self.registry,
            self,
            self.lifetime,
            lambda: self.settings,
            everybody=lambda: self.everybody(),
            clock=lambda: self.clock,
        )

    async def two(self):
        self.asked += 1
        await asyncio.sleep(0)
        return Whole(report(self.admitted, 0, 50), [report(20, 3, 50)], 2)


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


class Worker:
    """One of several, which has its share of a router's limit."""

    def __init__(self, folder, number, of, settings):
        telemetry, queue = Telemetry(Counters(frozenset()), lambda: 1.0), Admission(share_of(settings, number, of))
        place = WorkerContext(number, of, str(folder), port=0, line=0, starts=1)
        self.queue, self.settings = queue, queue.limits
        self.reports = WorkerReports(place, telemetry, queue, lambda: EMPTY)

    def serves(self, count):
        for _ in range(count):
            self.queue.arrive("k", 0, 1, now=0.0)


async def test_several_workers_have_the_limit_of_all_of_them(tmp_path):
    """Each has a share of it: 1,100 requests of four workers are 27 % of 4,096, and not all that one may have."""
    workers = [Worker(tmp_path, number, 4, Settings(max_concurrency=4096)) for number in range(4)]
    for number, worker in enumerate(workers):
        worker.serves(100 + 117 * number + 1)
    async with AsyncExitStack() as stack:
        for worker in workers[:3]:
            await stack.enter_async_context(worker.reports.running())
        async with workers[3].reports.running():
            found = await World(workers[0].reports.whole).meter.now()
        without = await World(workers[0].reports.whole).meter.now()

    assert (found.admitted.running, found.admitted.most) == (1106, 4096)
    assert (found.utilization, found.weight) == (1106 / 4096, 73)
    # What a worker that has ended cannot take is not there.
    assert (without.admitted.running, without.admitted.most) == (654, 3072)


async def test_a_limit_that_changes_counts_at_once():
    """As each worker's settings are read again (SIGHUP)."""
    queue = Admission(Settings(max_concurrency=100))
    everybody = SingleWorker(Settings()).everybody(Telemetry(Counters(frozenset()), lambda: 1.0), queue, lambda: EMPTY)
    queue.change(Settings(max_concurrency=200), now=0.0)

    assert (await World(everybody).meter.now()).admitted.most == 200


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
