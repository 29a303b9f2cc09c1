"""Benchmarks run rarely, and what they call changes often: here they start, with next to nothing to measure."""

import json

import httpx
import pytest

from benchmarks import page
from benchmarks.answers.ask import bytes_moved
from benchmarks.discovery import report, simulate


def test_a_simulated_fleet_is_measured_and_written(tmp_path):
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
    report.write(found, tmp_path / "fleet.json")

    assert "`expected_ttft`" in (tmp_path / "fleet.md").read_text()


@pytest.mark.parametrize("name", ["vllm:pdrelay_bytes_transferred_total", "vllm:nixl_bytes_transferred_sum"])
def test_questions_are_asked_with_the_bytes_that_engines_have_moved(name):
    answers = httpx.MockTransport(lambda request: httpx.Response(200, text=f'{name}{{engine="0"}} 7.0\n'))

    assert bytes_moved(httpx.Client(transport=answers), "http://127.0.0.1:8100") == 7
