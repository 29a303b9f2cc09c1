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


@pytest.mark.parametrize(("ours", "reached"), [(0.10, True), (0.15, True), (0.151, False)])
def test_the_cost_of_a_request_beside_the_rust_router(ours, reached):
    runs = {"short": {"xpyd": [run(ours)], "vllm-router": [run(0.2)]}}

    goal = told(runs)["CPU a request, xpyd / vllm-router", "`short`"]

    assert goal.reached == reached
    assert goal.found == f"{ours / 0.2:.2f}"


@pytest.mark.parametrize(("ours", "reached"), [(0.2, True), (0.21, False)])
def test_the_cost_of_a_request_beside_the_toy(ours, reached):
    runs = {"chat": {"xpyd": [run(ours)], "toy": [run(4.0)]}}

    assert told(runs)["CPU a request, toy / xpyd", "`chat`"].reached == reached


@pytest.mark.parametrize(("pushed", "reached"), [(0.16, True), (0.17, False)])
def test_the_cost_of_push_beside_pull(pushed, reached):
    """Both are ours, in scenarios of their own."""
    runs = {"short": {"xpyd": [run(0.1)]}, "push": {"xpyd": [run(pushed)]}}

    assert told(runs)["CPU a request, push / pull", "`push`"].reached == reached


@pytest.mark.parametrize(("queued", "reached"), [(0.13, True), (0.14, False)])
def test_the_cost_of_a_request_that_waits(queued, reached):
    """A full router must not become a dear one."""
    runs = {"short": {"xpyd": [run(0.1)], "queued": [run(queued)]}}

    assert told(runs)["CPU a request, queued / xpyd", "`short`"].reached == reached


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
