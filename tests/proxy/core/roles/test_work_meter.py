"""The work that is measured, beside the work that ``xpyd plan`` computes of the same traffic."""

import pytest

from support.fluid_fleet import MADE, OUTPUT, PROMPT, RATE, TARGETS, FluidFleet
from xpyd_proxy.core.model import Role
from xpyd_proxy.core.roles.role_controller import RoleLimits
from xpyd_proxy.core.roles.work_meter import WorkMeter
from xpyd_proxy.planning.queueing import Spread
from xpyd_proxy.planning.sizing import Aims, Rates, Resource, Traffic, plan


@pytest.mark.parametrize("per_s", [5.0, 15.0, 25.0])
def test_what_is_measured_is_what_the_plan_says(per_s):
    """An operator sizes a fleet with one and runs it with the other: they must not contradict each other."""
    spread = Spread(PROMPT, 0.0, PROMPT), Spread(OUTPUT, 0.0, OUTPUT)
    planned = plan(Traffic(per_s, *spread), Rates(RATE, MADE, 10**9), Aims(TARGETS.itl_s))
    fleet = FluidFleet(10, 12)
    found = fleet.run(planned.work[Resource.PREFILL_COMPUTE], planned.work[Resource.DECODE_COMPUTE], 600)

    assert found.prefill.busy == pytest.approx(planned.work[Resource.PREFILL_COMPUTE], rel=0.25)
    assert found.decode.busy == pytest.approx(planned.work[Resource.DECODE_COMPUTE], rel=0.25)
    assert abs(found.wanted.prefill - planned.need.prefill) <= 1
    assert abs(found.wanted.decode - planned.need.decode) <= 2


def test_a_queue_that_grows_is_traffic_that_is_not_served():
    """An engine that is always busy serves what it can: what arrives shows in its queue alone."""
    fleet = FluidFleet(4, 12, limits=RoleLimits(min_decode=12))
    found = fleet.run(6.0, 2.0, 120).prefill

    assert found.tokens_per_s == pytest.approx(4 * RATE, rel=0.05)
    assert found.arriving_per_s == pytest.approx(6 * RATE, rel=0.1)
    assert found.queued_tokens > 0


def test_what_waits_before_prefill_engines_is_expected_at_decode_engines():
    """Else decode engines are given away that are needed as soon as the prompts are computed."""
    fleet = FluidFleet(4, 4)
    readings = []
    meter = WorkMeter(TARGETS)
    for _ in range(12):
        fleet.step(8.0, 1.0)
        readings = fleet.readings()
        meter.look(readings)
    prefill = meter.prefill(0)

    assert prefill.is_late
    assert meter.decode(prefill).busy == pytest.approx(2 * meter.decode(None).busy, rel=0.1)


def test_requests_that_wait_in_the_router_are_part_of_the_queue():
    """A router with max_concurrency keeps them from the engines, which then seem to have no queue."""
    fleet = FluidFleet(4, 4)
    meter = WorkMeter(TARGETS)
    for _ in range(12):
        fleet.step(3.0, 1.0)
        meter.look(fleet.readings())

    assert meter.prefill(10).queued_tokens == pytest.approx(10 * PROMPT, rel=0.01)


def test_streams_that_a_late_turn_leaves_behind_do_not_spoil_the_rate():
    """They keep the engine busy for as long as an answer takes, and compute no prompt: it is not slower for that."""
    fleet = FluidFleet(2, 4)
    fleet.run(0.8, 1.0, 300)
    late = fleet.of(Role.PREFILL)[0]
    for _ in range(30):
        fleet.step(0.8, 1.0)
        late.running += 4.0
        late.itl_count += 2_000.0
        late.itl_sum += 40.0
        found = fleet.look()

    assert found.prefill.rate == pytest.approx(RATE, rel=0.2)
    assert found.prefill.tokens_per_s == pytest.approx(0.8 * RATE, rel=0.05)  # what it computes counts


def test_a_restarted_engine_begins_anew():
    """Its counters begin at 0: the difference is no negative work."""
    fleet = FluidFleet(2, 2)
    fleet.run(1.0, 1.0, 100)
    one = fleet.of(Role.PREFILL)[0]
    one.computed = one.prompts = 0.0
    found = fleet.run(1.0, 1.0, 10)

    assert "e00" in found.why
    assert found.prefill.tokens_per_s > 0
