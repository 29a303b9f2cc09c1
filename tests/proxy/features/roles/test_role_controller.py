"""Which engine turns, and when none does: on fleets whose rates and queues are known exactly."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading
from pdrelay_proxy.features.roles.role_controller import FleetSnapshot, RoleChange, RoleController, RoleLimits, Verdict
from support.fluid_fleet import FluidFleet
from support.searching import examples

P, D = Role.PREFILL, Role.DECODE


def counts(fleet):
    return len(fleet.of(P)), len(fleet.of(D))


def test_traffic_that_changes_sides_makes_engines_follow():
    """What the controller is for: prompts, then answers, and back."""
    fleet = FluidFleet(8, 8)
    fleet.run(7.4, 2.8, 1200)
    prompts = counts(fleet)
    fleet.run(2.8, 7.4, 3600)
    answers = counts(fleet)
    fleet.run(7.4, 2.8, 3600)

    assert prompts == counts(fleet) == (11, 5)
    assert answers == (5, 11)
    assert fleet.decisions[-1].verdict is Verdict.BALANCED


@pytest.mark.parametrize(
    ("before", "after", "engines", "to"),
    [((0.4, 1.3), (1.4, 0.5), (1, 2), P), ((1.3, 0.4), (0.5, 1.4), (2, 1), D), ((1.0, 1.75), (2.1, 0.5), (2, 2), P)],
)
def test_traffic_that_changes_at_once_is_followed_before_the_minute_is_over(before, after, engines, to):
    """A mean over both traffics is of neither, so the role that gives an engine seemed to have none for 50 s."""
    fleet = FluidFleet(*engines)
    fleet.run(*before, 600)
    changed = fleet.now
    turned = len(fleet.turned)
    for _ in range(12):
        fleet.step(*after, 5.0)
        fleet.look()
    at, role = fleet.turned[turned]

    assert at - changed <= 45
    assert role is to


@settings(max_examples=examples(20))
@given(
    prefill=st.integers(1, 12),
    decode=st.integers(1, 12),
    busy=st.tuples(st.floats(0.3, 14), st.floats(0.3, 14)),
    noise=st.floats(0, 0.14),
    seed=st.integers(0, 9),
)
def test_constant_load_with_noise_never_turns_an_engine_there_and_back(prefill, decode, busy, noise, seed):
    """An engine that turns pays for it: streams move, caches are cold. Noise must not make it do so for nothing."""
    fleet = FluidFleet(prefill, decode, noise=noise, seed=seed, limits=RoleLimits(turns_per_hour=60))
    fleet.run(*busy, 1200)

    assert len({role for _, role in fleet.turned}) <= 1


@settings(max_examples=examples(20))
@given(
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20), st.integers(1, 30)), min_size=1, max_size=6),
    prefill=st.integers(1, 8),
    decode=st.integers(1, 8),
    least=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    most=st.integers(1, 6),
    cooldown=st.sampled_from([30.0, 60.0, 300.0]),
)
def test_whatever_the_load_does_bounds_and_pauses_hold(steps, prefill, decode, least, most, cooldown):
    """These are promises to the operator, and no load is a reason to break them."""
    limits = RoleLimits(*least, cooldown_s=cooldown, turns_per_hour=most)
    fleet = FluidFleet(prefill, decode, limits=limits)
    for prefill_busy, decode_busy, looks in steps:
        for _ in range(looks):
            before = counts(fleet)
            fleet.step(prefill_busy, decode_busy)
            turn = fleet.look().role_change
            if turn is not None:
                giver = 1 if turn.role is P else 0
                assert before[giver] > least[giver]
    times = [at for at, _ in fleet.turned]

    assert all(later - earlier >= cooldown for earlier, later in pairwise(times))
    assert all(sum(at - 3600 < each <= at for each in times) <= most for at in times)


def test_the_numbers_of_a_decision_are_those_of_the_fleet():
    """The log line, the metric and the page show them: an operator must be able to check a decision."""
    found = FluidFleet(8, 8).run(5.0, 3.0, 300)

    assert found.prefill.busy == pytest.approx(5.0, rel=0.2)
    assert found.prefill.rate == pytest.approx(10_000, rel=0.2)
    assert found.prefill.tokens_per_s == pytest.approx(50_000, rel=0.05)
    assert found.decode.busy == pytest.approx(3.0, rel=0.35)  # the line is drawn far: all batches are alike
    assert 7 <= found.wanted.prefill <= 9
    assert 4 <= found.wanted.decode <= 6


def test_without_traffic_of_a_role_there_is_no_decision():
    """What engines of that role can do was never seen: a guess would take engines from somebody."""
    found = FluidFleet(4, 4).run(3.9, 0.0, 600)

    assert (found.verdict, found.role_change, found.wanted) == (Verdict.UNKNOWN, None, None)
    assert "decode engines have had too little to do" in found.why


def test_an_engine_that_does_not_show_its_metrics_is_named():
    """Its load is unknown, so no sum is right; and the operator must learn which one it is."""
    fleet = FluidFleet(4, 4)
    fleet.run(3.8, 1.0, 100)
    readings = [replace(one, totals=None) if one.name == "e02" else one for one in fleet.readings()]
    found = fleet.controller.decide(FleetSnapshot(readings), now=fleet.now + 30)

    assert found.verdict is Verdict.UNKNOWN
    assert "e02" in found.why


def test_what_was_wanted_stays_for_a_while():
    """An autoscaler that follows each dip would take engines away that the next minute needs."""
    fleet = FluidFleet(8, 8)
    before = fleet.run(6.0, 4.0, 600).wanted
    soon = fleet.run(1.0, 4.0, 120).wanted
    late = fleet.run(1.0, 4.0, 600).wanted

    assert soon.prefill >= before.prefill - 1
    assert late.prefill <= 3


@pytest.mark.parametrize(
    ("change", "verdict", "why"),
    [
        ({"min_decode": 8}, Verdict.BOUND, "decode keeps 8"),
        ({"turns_per_hour": 0}, Verdict.SPENT, "0 engines have turned in the last hour"),
    ],
)
def test_a_decision_says_what_holds_it_back(change, verdict, why):
    """An operator who waits for a turn reads the reason, with the numbers."""
    found = FluidFleet(8, 8, limits=replace(RoleLimits(), **change)).run(9.0, 2.0, 300)

    assert found.verdict is verdict
    assert why in found.why
    assert found.why.startswith("prefill lacks an engine: ")


def test_another_controller_goes_on_where_the_first_one_ended():
    """One is killed, or the lease changes hands: what earlier turns cost the fleet does not start anew."""
    limits = RoleLimits(cooldown_s=300.0)
    fleet = FluidFleet(8, 8, limits=limits)
    fleet.run(9.0, 2.0, 60)
    assert len(fleet.turned) == 1
    fleet.controller = RoleController(fleet.targets, limits)
    fleet.run(9.0, 2.0, 240)

    assert len(fleet.turned) == 1
    assert fleet.decisions[-1].verdict is Verdict.COOLING


def test_two_controllers_at_the_same_time_choose_the_same_engine():
    """The lease may have two holders for a moment. A turn that is asked for twice is one turn."""
    fleet = FluidFleet(8, 8)
    other = RoleController(fleet.targets, fleet.limits)
    snapshots = []
    for _ in range(15):
        fleet.step(9.0, 2.0)
        readings = fleet.readings()
        first, second = (
            one.decide(FleetSnapshot(some), now=fleet.now)
            for one, some in ((fleet.controller, readings), (other, readings[::-1]))
        )
        snapshots.append((first.role_change, second.role_change))

    assert any(first is not None for first, _ in snapshots)
    assert all(first == second for first, second in snapshots)


def assigned(both, *, prefill=0, decode=0, limits):
    """Let a controller see so many engines of each kind, again and again; return the roles that it gives, in order."""
    fleet = FluidFleet(prefill, decode, limits=limits)
    other = FluidFleet(both, 0)
    free = {f"x{one.name}": replace(one, name=f"x{one.name}", key=f"x{one.key}") for one in other.readings()}
    given = []
    for _ in range(both + 3):
        fleet.now += 5.0
        readings = [*fleet.readings(), *given]
        found = fleet.controller.decide(FleetSnapshot(readings, serving_both=list(free.values())), now=fleet.now)
        if found.verdict is not Verdict.ASSIGN:
            return [one.role for one in given], found
        given.append(replace(free.pop(found.role_change.instance), role=found.role_change.role))
    raise AssertionError(found)


@pytest.mark.parametrize(
    ("both", "there", "limits", "given"),
    [
        (5, {}, RoleLimits(), [D, P, D, P, D]),
        (2, {}, RoleLimits(), [D, P]),
        (4, {}, RoleLimits(min_prefill=3), [P, P, D, P]),
        (3, {"prefill": 1, "decode": 4}, RoleLimits(), [P, P, P]),
        (1, {"decode": 1}, RoleLimits(), [P]),
        (1, {"prefill": 1}, RoleLimits(), [D]),
    ],
)
def test_engines_that_serve_both_roles_get_one_by_one_the_role_that_has_fewer(both, there, limits, given):
    """Nothing is known of a fleet that starts. No cool-down, no hour: each of them has its role already."""
    roles, last = assigned(both, **there, limits=limits)

    assert roles == given
    assert last.changes_in_hour == 0


def test_an_engine_that_comes_to_a_fleet_at_work_gets_the_role_that_is_more_pressed():
    """A pod that is replaced, or one more: to give it the smaller role would undo what traffic has asked for."""
    fleet = FluidFleet(6, 2)
    fleet.run(4.4, 0.9, 300)
    new = EngineReading("decode-9", P, "x", None)
    found = fleet.controller.decide(FleetSnapshot(fleet.readings(), serving_both=[new]), now=fleet.now)

    assert (found.verdict, found.role_change) == (Verdict.ASSIGN, RoleChange("decode-9", P))
    assert found.why == "decode-9 to prefill: 1 engines serve both roles, 6 engines are prefill and 2 are decode"


@pytest.mark.parametrize(
    ("count", "change", "verdict", "why"),
    [
        (1, {}, Verdict.BOUND, "e00 serves both roles, and is the only engine"),
        (2, {"may_turn": False}, Verdict.STUCK, "2 engines serve both roles, and none of them can turn (e00)"),
    ],
)
def test_engines_that_must_serve_both_roles_go_on_with_it(count, change, verdict, why):
    """The only one, and those whose connector cannot."""
    fleet = FluidFleet(count, 0)
    both = [replace(one, **change) for one in fleet.readings()]
    found = fleet.controller.decide(FleetSnapshot([], serving_both=both), now=fleet.now)

    assert (found.verdict, found.why, found.role_change) == (verdict, why, None)


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({"leads": False}, Verdict.ELSEWHERE),
        ({"turning": ["e09"]}, Verdict.TURNING),
        ({"trouble": "x"}, Verdict.UNKNOWN),
    ],
)
def test_engines_that_serve_both_roles_wait_like_those_that_turn(more, verdict):
    """For the router that decides, for the one that turns now, and for what must be known."""
    fleet = FluidFleet(2, 2)
    found = fleet.controller.decide(FleetSnapshot([], serving_both=fleet.readings(), **more), now=fleet.now)

    assert (found.verdict, found.role_change) == (verdict, None)


def test_an_engine_that_turns_keeps_the_others_in_their_roles():
    """One at a time."""
    fleet = FluidFleet(8, 8)
    fleet.run(9.0, 2.0, 30)
    fleet.step(9.0, 2.0)
    readings = [one for one in fleet.readings() if one.name != "e09"]
    found = fleet.controller.decide(FleetSnapshot(readings, ["e09"]), now=fleet.now)

    assert (found.verdict, found.why, found.role_change) == (Verdict.TURNING, "e09 turns", None)
    assert found.wanted is not None


def test_a_router_that_does_not_lead_measures_and_waits():
    """It goes on at once when the other one is gone: its rates are learned."""
    fleet = FluidFleet(8, 8)
    for _ in range(10):
        fleet.step(9.0, 2.0)
        found = fleet.controller.decide(FleetSnapshot(fleet.readings(), leads=False, leader="pod-2"), now=fleet.now)

    assert (found.verdict, found.why, found.role_change) == (Verdict.ELSEWHERE, "pod-2 decides", None)
    assert found.wanted.prefill >= 12


def test_engines_that_cannot_turn_are_said_to_be_stuck():
    """Where engines cannot turn, the operator learns what is lacking: an autoscaler adds it."""
    fleet = FluidFleet(8, 8)
    for _ in range(10):
        fleet.step(9.0, 2.0)
        readings = [replace(one, may_turn=False) for one in fleet.readings()]
        found = fleet.controller.decide(FleetSnapshot(readings), now=fleet.now)

    assert found.verdict is Verdict.STUCK
    assert found.wanted.prefill >= 12
