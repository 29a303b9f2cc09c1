"""Engines behind https whose certificates have one name for all, as pods have that are found by their IPs."""

import re
from argparse import ArgumentTypeError
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from pdrelay_proxy.known_settings import OPTIONS
from pdrelay_proxy.setting_values import read
from pdrelay_tools.simulated.rules import expected_text
from support.certificates import Authority
from support.router_process import KEY, router_processes
from support.sim import serving, sims, until

pytestmark = pytest.mark.processes


NAME = "engines.llm.svc"
BODY = {"prompt": "once upon a time", "max_tokens": 3}


class Fleet:
    """Two engines that serve https, and a router process that knows their authority."""

    def __init__(self, process, engines, pair):
        self.process = process
        self.engines = engines
        self.pair = pair

    def add(self, address):
        body = {"type": "decode", "instance": address}
        return httpx.post(f"{self.process.url}/instances/add", json=body, headers=KEY, timeout=30)

    def post(self):
        return httpx.post(f"{self.process.url}/v1/completions", json=BODY, timeout=30)

    def get(self, path):
        return httpx.get(self.process.url + path, timeout=30)

    def state(self, name):
        (found,) = [
            one
            for one in httpx.get(f"{self.process.url}/instances", headers=KEY, timeout=30).json()["instances"]
            if one["id"] == name
        ]
        return found

    def failures(self):
        text = self.get("/metrics").text
        found = re.findall(r'^pdrelay_engine_tls_failures_total\{instance="(\S+)",reason="(\w+)"\} (\S+)$', text, re.M)
        return {(name, reason): float(count) for name, reason, count in found}


@contextmanager
def https_fleet(folder, shown):
    """``shown``: the names in the engines' certificate."""
    theirs = Authority(folder, "theirs")
    pair = theirs.sign("engine", shown)
    engines = sims()
    with ExitStack() as stack:
        at = [
            stack.enter_context(serving(engine, ssl_certfile=pair.cert, ssl_keyfile=pair.key))
            for engine in engines.values()
        ]
        known = ("--prefill", f"https://{at[0]}", "--decode", f"https://{at[1]}")
        trust = ("--engine-ca", theirs.own.cert, "--engine-server-name", NAME)
        beat = ("--health-check-interval", "0.2")
        (process,) = stack.enter_context(router_processes(folder, 1, *known, *trust, *beat))
        yield Fleet(process, engines, pair)


def test_requests_and_probes_reach_engines_by_the_name_of_all(tmp_path):
    """Both legs, health checks, models and metrics of engines at addresses that no certificate has."""
    with https_fleet(tmp_path, f"DNS:{NAME}") as fleet:
        until(lambda: all(fleet.state(name)["state"] == "healthy" for name in ("prefill-0", "decode-0")))
        answer = fleet.post()

        assert answer.json()["choices"][0]["text"] == expected_text(BODY)
        assert [[one.path for one in engine.log] for engine in fleet.engines.values()] == [["/v1/completions"]] * 2
        assert fleet.failures() == {}


def test_an_engine_that_is_added_by_hand_needs_the_name_as_well(tmp_path):
    """The router connects to the address that it has looked at, and looks for the name all the same."""
    with https_fleet(tmp_path, f"DNS:{NAME}") as fleet:
        stranger = Authority(tmp_path, "others").sign("stranger", f"DNS:{NAME}")
        with (
            serving(sims()["d0"], ssl_certfile=fleet.pair.cert, ssl_keyfile=fleet.pair.key) as ours,
            serving(sims()["d0"], ssl_certfile=stranger.cert, ssl_keyfile=stranger.key) as theirs,
        ):
            added = fleet.add(f"https://{ours}")
            refused = fleet.add(f"https://{theirs}")

            assert added.status_code == 200, added.text
            until(lambda: fleet.state("decode-1")["state"] == "healthy")
            assert refused.status_code == 400


@pytest.mark.parametrize(
    "text",
    ["", "*", "*.llm.svc", "https://engines.llm.svc", "engines.llm.svc:8100", "10.0.0.1", "::1", "a b", "a.svc."],
)
def test_only_a_dns_name_can_be_the_name_of_all(text):
    """An empty one would switch the check off in some libraries, and a star is for certificates."""
    with pytest.raises(ArgumentTypeError, match="is not a DNS name: write it without scheme"):
        read(OPTIONS["engine_server_name"].kind, text)
