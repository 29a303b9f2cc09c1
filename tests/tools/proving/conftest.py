"""Simulated engines on real sockets, and the command in front of them."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from pdrelay_proxy.cli import main
from pdrelay_tools.simulated.engine import Sim
from support.sim import serving, sims


@pytest.fixture
def fleet():
    """A prefill and a decode engine, and a single one as the reference."""
    engines = sims(1, 1)
    with ExitStack() as stack:
        at = {name: f"http://{stack.enter_context(serving(sim))}" for name, sim in engines.items()}
        reference = Sim("decode")
        at["reference"] = f"http://{stack.enter_context(serving(reference))}"
        yield SimpleNamespace(p=engines["p0"], d=engines["d0"], reference=reference, at=at)


@pytest.fixture
def prove(fleet, tmp_path, capsys):
    """Run the command; give its exit code, what each check found, the page and what was printed."""

    def run(*arguments):
        page = tmp_path / "page.json"
        at = fleet.at
        urls = ["--prefill", at["p0"], "--decode", at["d0"], "--reference", at["reference"]]
        code = main(["prove", *urls, "--seed", "7", "--report", str(page), *arguments])
        found = json.loads(page.read_text()) if page.exists() else {"checks": []}
        names = {check["name"]: [each["name"] for each in check["findings"]] for check in found["checks"]}
        return SimpleNamespace(code=code, findings=names, page=found, said=capsys.readouterr())

    return run
