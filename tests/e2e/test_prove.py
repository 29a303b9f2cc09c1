"""``xpyd prove`` on real engines: green for ours, and a connector with a fault is found."""

import json

import pytest

from xpyd_proxy.cli import main

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def prove(tmp_path, capfd):
    """Run the suite against engines; return the exit code and the page."""

    def run(prefill, decode, reference, *arguments):
        page = tmp_path / "page.json"
        urls = [f"--prefill={spec.base_url}" for spec in prefill] + [f"--decode={spec.base_url}" for spec in decode]
        code = main(["prove", *urls, "--reference", reference.base_url, "--report", str(page), *arguments])
        return code, json.loads(page.read_text())

    return run


def findings(page):
    """What was found: check/finding -> what was seen."""
    return {
        f"{check['name']}/{found['name']}": found["seen"] for check in page["checks"] for found in check["findings"]
    }


QUICK = [f"--only={name}" for name in ("lengths", "boundaries", "prefix-hits", "burst", "abandoned-streams", "refused")]


def test_pull_is_green(prove, engines):
    """2P2D, as a router would use them: equal, and nothing is held."""
    code, page = prove([engines.p0, engines.p1], [engines.d0, engines.d1], engines.reference, *QUICK)

    assert findings(page) == {}
    assert code == 0


@pytest.mark.thorough  # two minutes: it waits for a lease, and these engines are no faster for it
def test_push_is_green(prove, pushing, engines):
    """All checks where prefill engines write, chunk by chunk and whole requests at once."""
    code, page = prove([pushing.chunk, pushing.request], [pushing.d0, pushing.d1], engines.reference)

    assert findings(page) == {}
    assert code == 0
