"""The simulation of a fleet, in its quick form: it runs, and its page says what it has found."""

import json
import subprocess
import sys

import pytest

from support.cluster import ROOT

pytestmark = pytest.mark.processes


@pytest.mark.slow  # it simulates a fleet
def test_the_quick_simulation_writes_numbers_and_a_page(tmp_path):
    """So that `make sim-fleet` works when somebody needs it."""
    command = [sys.executable, ROOT / "tests/benchmarks/discovery/simulate.py", "--quick", "--out", tmp_path / "f.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=55)

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["discovery"]["rollout"]["events"] == 60
    page = (tmp_path / "f.md").read_text()
    assert page.startswith("# A simulated fleet\n")
    assert all(f"`{name}`" in page for name in found["choices"]["one revision"])
    assert page.count("\n## ") == 6
    assert set(found["shared"]) == {"1", "2", "pods"}
