"""Somebody on the engines' own network who does not know their secret; engines and transfers are real."""

import json
import os
import subprocess
import sys

import pytest

from support.cluster import ROOT, nothing_held, wait_until
from support.legs import decode, plain, prefill, prompt_of, text_of
from support.victims import HELD, LOADS, LONG

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
REFUSED = "vllm:pdrelay_connections_refused_total"


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: both modes have the same side channel, and the same listeners."""
    return params["mode"] == "push"


def test_a_stranger_gets_no_welcome_and_no_lease_and_ends_none(network, p, victims, reference):
    """No Welcome, so nothing of P's memory; and what P holds for a decode engine stays, and is read by that one."""
    d = victims.hasty["recompute"]
    prompt = prompt_of(460)
    before = p.now(HELD)
    loads = d.now(LOADS)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    pipe = subprocess.PIPE
    argv = [*network.d.prefix, sys.executable, "-m", "support.stranger"]
    with subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as stranger:
        assert stranger.stdout.readline() == "ready\n"  # its imports may take longer than the lease
        params = prefill(p.spec, prompt)
        request = params.get("transfer_id") or params["remote_request_id"]
        at = (params["remote_host"], params["remote_port"], params["remote_engine_id"], request)
        said, errors = stranger.communicate(" ".join(map(str, at)) + "\n", timeout=60)
    assert stranger.returncode == 0, errors
    got = json.loads(said)

    assert "PDRELAY_CONNECTOR_SECRET" in got.pop("no secret")
    assert "PDRELAY_CONNECTOR_SECRET" in got.pop("a guess")
    assert got.pop("in the clear") == ""
    assert set(got.values()) == {"Challenge, Refusal"}
    assert p.now(HELD) == before + 1
    assert text_of(decode(d.spec, prompt, params)) == plain(reference, prompt)
    assert d.now(LOADS) == loads + 1
    wait_until(lambda: nothing_held(p.spec), seconds=LONG, what="P has its blocks again")
    wait_until(lambda: p.now(REFUSED) >= 8, seconds=LONG, what="P counts whom it refused")


def test_engines_listen_where_they_are_told_and_nowhere_else(network, p, victims):
    """HTTP at its address; the side channel and NIXL on the data network; all else on loopback."""
    for host, engines in ((network.p, [p]), (network.d, victims.decoders)):
        http = {(host.mgmt_ip, victim.spec.port) for victim in engines}
        others = {(ip, port) for ip, port in host.listening() if not ip.startswith("127.") and ip != "::1"} - http

        assert {ip for ip, _ in others} == {host.data_ip}
    assert (network.p.data_ip, p.spec.side_channel_port) in network.p.listening()
