"""The work that is measured, beside the work that ``pdrelay plan`` computes of the same traffic."""

from dataclasses import replace

import pytest

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading, EngineTotals
from pdrelay_proxy.features.roles.role_controller import RoleLimits
from pdrelay_proxy.features.roles.work_meter import WorkMeter
from pdrelay_tools.planning.queueing import Spread
from pdrelay_tools.planning.sizing import Aims, Rates, Resource, Traffic, plan
from support.fluid_fleet import MADE, OUTPUT, PROMPT, RATE, TARGETS, FluidFleet


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
        meter.add_readings(readings)
    prefill = meter.prefill(0)

    assert prefill.is_late
    assert meter.decode(prefill).busy == pytest.approx(2 * meter.decode(None).busy, rel=0.1)


def test_requests_that_wait_in_the_router_are_part_of_the_queue():
    """A router with max_concurrency keeps them from the engines, which then seem to have no queue."""
    fleet = FluidFleet(4, 4)
    meter = WorkMeter(TARGETS)
    for _ in range(12):
        fleet.step(3.0, 1.0)
        meter.add_readings(fleet.readings())

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


@pytest.mark.parametrize("total", ["prefill_s", "steps"])
def test_an_engine_that_soon_has_more_prompts_than_before_its_restart_begins_anew(total):
    """Its first prompt had compiled kernels for half a minute: that it now has worked for less is no negative time."""
    meter = WorkMeter(TARGETS)
    young = EngineTotals(0.0, 0.0, 0.0, 0.1, 100.0, 1.0, 0.0, 0.0, prefill_s=30.0, steps=40.0)
    again = replace(young, at=35.0, computed_tokens=900.0, prompts=9.0, **{total: 5.0})
    unknown = list[int]()
    for totals in (young, replace(young, at=30.0), again):
        readings = [EngineReading(InstanceId("p0"), Role.PREFILL, "p0", totals)]
        meter.add_readings(readings)
        unknown.append(len(meter.unknown(readings, totals.at)))

    assert unknown == [1, 0, 1]


def shown_by_vllm(looks, *, per_s, prompt, prefill_s, together=1, running=0.0):
    """Return what a meter makes of a prefill engine as vLLM shows it, with so many steps of prompts a second.

    Its gauges are those behind its last step: a prompt that takes one step is in none of them.
    """
    meter = WorkMeter(TARGETS)
    for look in range(looks):
        steps = float(int(look * 5 * per_s))
        prompts = together * steps
        totals = EngineTotals(
            5.0 * look, running, 0.0, 0.1, prompts * prompt, prompts, 0.0, 0.0, prompts * prefill_s, steps
        )
        meter.add_readings([EngineReading(InstanceId("p0"), Role.PREFILL, "p0", totals)])
    return meter.prefill(0)


def test_the_rate_of_prompts_that_take_one_step_is_known():
    """vLLM's gauges never show them: an engine that is busy 80 % of the time seemed to be idle, and infinitely fast."""
    found = shown_by_vllm(20, per_s=2.0, prompt=1_000, prefill_s=0.4)

    assert found.rate == pytest.approx(2_500, rel=0.05)
    assert found.busy == pytest.approx(0.8, rel=0.05)


def test_prompts_of_one_step_share_its_time():
    """Each of them has taken as long as the step: together they have not."""
    found = shown_by_vllm(20, per_s=2.0, prompt=250, prefill_s=0.4, together=4)

    assert found.rate == pytest.approx(2_500, rel=0.05)
    assert found.busy == pytest.approx(0.8, rel=0.05)


def test_an_engine_is_busy_for_no_longer_than_there_was_time():
    """Prompts that share some of their steps count those twice."""
    found = shown_by_vllm(20, per_s=2.0, prompt=1_000, prefill_s=0.9)

    assert found.rate == pytest.approx(2_000, rel=0.05)
    assert found.busy == pytest.approx(1.0, rel=0.05)


def test_a_prompt_that_takes_longer_than_a_look_is_all_counted():
    """Its time is shown at its end, at once."""
    found = shown_by_vllm(40, per_s=1 / 20, prompt=40_000, prefill_s=16.0)

    assert found.rate == pytest.approx(2_500, rel=0.15)


@pytest.mark.parametrize("busy", [(0.2, 2.0), (2.0, 0.2)])
def test_numbers_are_of_the_traffic_since_it_changed(busy):
    """Half a minute behind a change nothing of what was before is in them."""
    fleet = FluidFleet(4, 4, limits=RoleLimits(turns_per_hour=0))
    fleet.run(*busy, 300)
    found = fleet.run(*reversed(busy), 30)

    assert found.prefill.tokens_per_s == pytest.approx(busy[1] * RATE, rel=0.1)
    assert found.decode.tokens_per_s == pytest.approx(busy[0] * MADE, rel=0.1)


def test_chance_is_no_change_of_traffic():
    """Three requests in twenty seconds and then one are what chance makes of four: a mean of a minute says more."""
    meter = WorkMeter(TARGETS)
    prompts = 0.0
    shown = list[float]()
    for look in range(48):
        prompts += (1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)[look % 8]
        totals = EngineTotals(5.0 * look, 0.0, 0.0, 0.1, prompts * 1_000, prompts, 0.0, 0.0, prompts * 2.0, prompts)
        meter.add_readings([EngineReading(InstanceId("p0"), Role.PREFILL, "p0", totals)])
        if look >= 16 and (found := meter.prefill(0)) is not None:
            shown.append(found.tokens_per_s)

    assert shown == pytest.approx([100.0] * 32, rel=0.2)
