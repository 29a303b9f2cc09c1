"""The benchmark's goals: each is told by the runs it is about, and by no others."""

import pytest

from benchmarks.router import goals
from benchmarks.router.figures import difference
from benchmarks.router.report import line
from benchmarks.router.scenarios import IDLE


def run(ms, *, requests=1000, tokens=2000, first=0.010, rss=60, faults=None):
    """One run whose router took so many CPU-milliseconds for a request."""
    return {
        "requests": requests,
        "done": requests,
        "tokens": tokens,
        "seconds": 1.0,
        "cpu": {"router": ms * requests / 1e3, "load": 0.02, "engines": 0.02},
        "first": {"p50": first, "p99": 2 * first},
        "rss": rss << 20,
        "faults": faults or {},
        "said": [],
    }


def told(runs):
    return {(each.what, each.where): each for each in goals.of(runs)}


COSTS = {
    "the Rust router": ({"short": {"xpyd": 0.10, "vllm-router": 0.2}}, "xpyd / vllm-router", "short", True),
    "just cheap enough": ({"short": {"xpyd": 0.15, "vllm-router": 0.2}}, "xpyd / vllm-router", "short", True),
    "not cheap enough": ({"short": {"xpyd": 0.151, "vllm-router": 0.2}}, "xpyd / vllm-router", "short", False),
    "the toy": ({"chat": {"xpyd": 0.2, "toy": 4.0}}, "toy / xpyd", "chat", True),
    "too near to the toy": ({"chat": {"xpyd": 0.21, "toy": 4.0}}, "toy / xpyd", "chat", False),
    "push": ({"short": {"xpyd": 0.1}, "push": {"xpyd": 0.16}}, "push / pull", "push", True),
    "dear push": ({"short": {"xpyd": 0.1}, "push": {"xpyd": 0.17}}, "push / pull", "push", False),
    "a full router": ({"short": {"xpyd": 0.1, "queued": 0.13}}, "queued / xpyd", "short", True),
    "a dear full router": ({"short": {"xpyd": 0.1, "queued": 0.14}}, "queued / xpyd", "short", False),
}  # CPU-milliseconds by scenario and router, what is compared, where, and whether the goal is reached


@pytest.mark.parametrize(("costs", "what", "where", "reached"), COSTS.values(), ids=COSTS)
def test_the_cost_of_a_request_beside_another(costs, what, where, reached):
    runs = {scenario: {name: [run(ms)] for name, ms in each.items()} for scenario, each in costs.items()}

    assert told(runs)[f"CPU a request, {what}", f"`{where}`"].reached == reached


def test_a_cost_is_told_as_a_share():
    runs = {"short": {"xpyd": [run(0.15)], "vllm-router": [run(0.2)]}}

    assert told(runs)["CPU a request, xpyd / vllm-router", "`short`"].found == "0.75"


def test_the_first_token_is_compared_within_rounds():
    """A slow round is slow for both."""
    ours = [run(1, first=0.011), run(1, first=0.111), run(1, first=0.009)]
    rust = [run(1, first=0.010), run(1, first=0.110), run(1, first=0.050)]
    runs = {"ttft32": {"xpyd": ours, "vllm-router": rust}}

    goal = told(runs)["TTFT p50, xpyd minus vllm-router", "`ttft32`"]

    assert (goal.found, goal.reached) == ("+1.00 ms", False)


def test_a_run_that_failed_is_in_no_comparison():
    """Neither is the one beside it."""
    runs = {"short": {"xpyd": [{"failed": "no"}, run(1)], "vllm-router": [run(9), run(2)]}}

    assert difference(runs, "short", "xpyd", "vllm-router", lambda one: one["cpu"]["router"]) == -1


@pytest.mark.parametrize("faults", [{}, {"wrong": 2}])
def test_one_wrong_byte_is_a_goal_missed(faults):
    runs = {"streams1000": {"xpyd": [run(1, faults=faults)], "vllm-router": [run(1, rss=61)]}}

    found = told(runs)

    assert found["All complete and exact", "`streams1000`"].reached == (not faults)
    assert found["Every byte and every leg", "all"].reached == (not faults)
    assert found["RSS, xpyd / vllm-router", "`streams1000`"].reached


@pytest.mark.parametrize(("start", "cores", "rss", "missed"), [(0.9, 0.009, 79, set()), (1.0, 0.01, 80, {0, 1, 2})])
def test_a_router_that_has_nothing_to_do(start, cores, rss, missed):
    runs = {IDLE: {"xpyd": [{"start": start, "cores": cores, "rss": rss << 20}]}}

    found = goals.of(runs)

    assert {at for at, goal in enumerate(found) if not goal.reached} == missed
    assert "s to start" in line(runs[IDLE]["xpyd"][0])


def test_a_load_generator_that_costs_as_much_as_a_router_measures_itself():
    runs = {"short": {"direct": [run(0)], "xpyd": [run(0.03)]}}

    goal = told(runs)["CPU a request, load generator / cheapest router", "`short`"]

    assert (goal.found, goal.reached) == ("0.67", False)


def test_what_was_not_measured_is_left_out():
    assert goals.of({}) == []
