"""Benchmarks run rarely, and what they call changes often: here they start, with next to nothing to measure."""

import json
import subprocess
import sys

import httpx
import pytest

from benchmarks import page
from benchmarks.answers.ask import bytes_moved
from benchmarks.chats import report as chats
from benchmarks.connector import report as connector
from benchmarks.discovery import report as fleet
from benchmarks.discovery import simulate
from benchmarks.first_token import bench as first_token
from benchmarks.limits import bench as limits
from benchmarks.replay import fit
from benchmarks.roles import report as roles
from benchmarks.roles.bench import times_of
from benchmarks.router import report as router
from benchmarks.router import soak, trial, workers
from benchmarks.router.contestants import CONTESTANTS
from benchmarks.shapes import report as shapes
from benchmarks.shapes.cases import CASES
from benchmarks.shapes.side import single_blocks
from support.greedy_streams import Stream

PAGES = {
    "chats": chats,
    "connector": connector,
    "first-token": first_token,
    "fleet": fleet,
    "limits": limits,
    "roles": roles,
    "router": router,
    "shapes": shapes,
    "soak": soak,
    "workers": workers,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_benchmark_makes_of_the_numbers(name, tmp_path, monkeypatch):
    """Somebody who repeats a measurement compares a page with this one."""
    found = page.PAGES / f"{name}.json"
    copy = tmp_path / found.name
    before = page.page_of(found).read_text()
    monkeypatch.setattr(page, "PAGES", tmp_path)
    page.page_of(copy).write_text(before)

    page.write(json.loads(found.read_text()), copy, PAGES[name].parts, getattr(PAGES[name], "picture", None))

    written = {made.name: made.read_text() for made in tmp_path.iterdir()}
    assert written == {made: (found.parent / made).read_text() for made in written}


def test_a_simulated_fleet_is_measured_and_written():
    """`make sim-fleet`, but for what waits or starts processes."""
    found = json.loads((page.PAGES / "fleet.json").read_text())
    cases = found["choices"]

    found |= {
        "choices": {case: simulate.choices((10,), 0.0, case) for case in cases},
        "request": simulate.request_cost(10, 0.0),
        "members": {"10": simulate.members(10)},
        "metrics": {"10": simulate.exposition(10)},
        "change": simulate.change_of(500),
        "bytes": simulate.wire(10),
    }

    assert "`expected_ttft`" in "".join(fleet.parts(found))


@pytest.mark.parametrize("name", ["vllm:pdrelay_bytes_transferred_total", "vllm:nixl_bytes_transferred_sum"])
def test_questions_are_asked_with_the_bytes_that_engines_have_moved(name):
    answers = httpx.MockTransport(lambda request: httpx.Response(200, text=f'{name}{{engine="0"}} 7.0\n'))

    assert bytes_moved(httpx.Client(transport=answers), "http://127.0.0.1:8100") == 7


def test_a_prompt_is_moved_block_by_block():
    case = CASES["block size 16 to 32"]
    whole = case.token_range(64)

    cut = list(single_blocks(case, 64))

    assert [(each.start, each.stop) for each in cut] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert [list(each.remote) for each in cut] == [[block] for block in whole.remote]
    assert [each.local[0] for each in cut] == [block for block in whole.local for _ in range(2)]


def test_streams_that_failed_are_not_taken_for_fast_ones():
    first, second = (Stream({}, text="a", first_s=seconds, last_s=seconds) for seconds in (1.0, 3.0))

    assert times_of([first, second, first])["ttft_p50_s"] == 1.0
    assert times_of([first, second, first])["ttft_p95_s"] == 3.0
    assert times_of([])["ttft_p50_s"] is None


def test_an_engine_is_fitted_to_what_another_one_has_shown():
    prefills = [(new, cached, 0.02 + 1e-4 * new + 1e-6 * cached) for new, cached in fit.PROMPTS + fit.HITS]
    decodes = [(batch, context, 0.01 + 1e-3 * batch) for batch in fit.BATCHES for context in fit.CONTEXTS]
    guess, *errors = fit.fitted(prefills, decodes)
    shown = [(load, fit.simulated(guess, load)) for load in fit.training(guess).values()]

    found, off = fit.searched(guess, shown, [*fit.isolated(prefills, decodes)], tries=2)
    judged = {
        name: (fit.simulated(guess, load), fit.simulated(found, load)) for name, load in fit.held_out(guess).items()
    }

    assert max(errors) < 0.1
    assert off < 0.1
    assert "bursts of 4 prompts" in fit.page(judged)


@pytest.mark.processes
@pytest.mark.slow  # a process each
@pytest.mark.parametrize(
    "command", [("instructions", "--calls", "short", "push"), ("feature_instructions", "--play", "all, ids")]
)
def test_requests_whose_instructions_are_counted_are_served(command):
    """Without valgrind, which takes minutes; anything but the right answer ends the program."""
    name, *arguments = command

    done = subprocess.run([sys.executable, "-m", f"benchmarks.router.{name}", *arguments], cwd=page.ROOT, check=False)

    assert done.returncode == 0


@pytest.mark.processes
@pytest.mark.slow  # a router, engines and a load generator in processes of their own
@pytest.mark.parametrize("router", [None, "plain", "toy"])
def test_a_router_is_measured(router):
    plan = {"seconds": 0.3, "warm": 8}

    found = trial.run(trial.apart(), CONTESTANTS.get(router), "short", plan, {})

    assert not found["faults"]
    assert found["done"] == found["first"]["count"] > 0
