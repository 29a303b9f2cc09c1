"""``pdrelay pairs``, against a router on a real socket."""

import json
from functools import partial

import httpx
import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.features.pairs.command import text

pytestmark = pytest.mark.edges


ROW = {
    "prefill": "prefill-0", "decode": "decode-1", "handovers": 2, "failed": 3, "failures": {"timeout": 3},
    "ttft_s": 0.01234, "bytes_per_s": 1.2345e10, "last_s": 4.2, "state": "resting", "reason": "handshake",
    "why": "10.0.0.1:5600 was not met: timed out", "failed_in_a_row": 3, "rest_s": 29.6, "mode": "push",
    "pull_s": 0.5, "push_s": 0.0204,
}  # fmt: skip
WELL = ROW | {
    "state": "well",
    "failures": {},
    "failed": 0,
    "reason": None,
    "why": None,
    "rest_s": None,
    "ttft_s": None,
    "bytes_per_s": 2.5e6,
    "mode": None,
}
FOUND = {"known": 2, "dropped": 0, "resting": 1, "unkept": 0, "pairs": [ROW, WELL]}


@pytest.fixture
def pairs(command):
    return partial(command, "pairs")


def test_pairs_are_shown_as_a_table(running, pairs):
    """Those that have served a request."""
    for _ in range(2):
        httpx.post(f"http://{running.router}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=20)
    code, out, err = pairs()

    assert (code, err) == (0, "")
    head, row = out.splitlines()
    assert head.split() == [
        "prefill",
        "decode",
        "state",
        "reason",
        "mode",
        "handovers",
        "failed",
        "ttft",
        "kv",
        "rate",
        "last",
    ]
    assert row.split()[:7] == ["prefill-0", "decode-0", "well", "-", "-", "2", "-"]


def test_scripts_get_the_routers_own_json(pairs):
    """All of it."""
    code, out, _ = pairs("--json")

    assert (code, json.loads(out)["pairs"]) == (0, [])


def test_pairs_that_never_failed_can_be_left_out(running, pairs):
    """There may be a thousand."""
    httpx.post(f"http://{running.router}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=20)
    _, out, _ = pairs("--failing")

    assert len(out.splitlines()) == 1


def test_a_router_that_is_not_there_is_an_error(capsys, monkeypatch):
    """In a sentence."""
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    assert main(["pairs", "--router", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("pdrelay pairs: ")


def test_people_see_what_a_pair_does_and_what_the_list_lacks():
    """It is a part: of those that were used lately."""
    lines = text(FOUND | {"dropped": 7}).splitlines()

    pair = "prefill-0  decode-1  "
    failing = "resting 30 s  handshake  push (500 and 20 ms)  2          3 timeout  12.3 ms  12.3 GB/s  4 s ago"
    well = "well          -          -                     2          -          -        2.5 MB/s   4 s ago"
    assert lines[1:3] == [pair + failing, pair + well]
    assert lines[3:] == [
        "decode-1 loads no KV of prefill-0: 10.0.0.1:5600 was not met: timed out",
        "7 pairs were forgotten to make room",
    ]


FORGED = "0.32\n2026-11-28 12:00:00,000 WARNING pdrelay_proxy decode-0 was removed\x1b[2J\u2028"


def test_a_cell_is_on_one_line_whatever_an_engine_says():
    """A reason, or a name, with a line break in it would look like another pair."""
    odd = ROW | {"reason": FORGED, "failures": {FORGED: 1}, "prefill": FORGED}

    lines = text(FOUND | {"pairs": [odd, WELL]}).splitlines()

    assert len(lines) == 4  # the last one says why the first pair's loads fail
    assert lines[1].count("0.32\\n2026-11-28") == 3
