"""Engines behind https whose certificates have one name for all, as pods have that are found by their IPs."""

import re
import ssl
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
        self.process, self.engines, self.pair = process, engines, pair

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
def https_fleet(folder, shown, *flags, name=NAME, authority=None, knows=None, **options):
    """``shown``: the names in the engines' certificate; ``knows``: an authority, in place of theirs."""
    theirs = authority or Authority(folder, "theirs")
    pair = theirs.sign("engine", shown)
    engines = sims()
    with ExitStack() as stack:
        at = [
            stack.enter_context(serving(engine, ssl_certfile=pair.cert, ssl_keyfile=pair.key, **options))
            for engine in engines.values()
        ]
        known = ("--prefill", f"https://{at[0]}", "--decode", f"https://{at[1]}")
        trust = ("--engine-ca", (knows or theirs).own.cert, *(("--engine-server-name", name) if name else ()))
        beat = ("--health-check-interval", "0.2")
        (process,) = stack.enter_context(router_processes(folder, 1, *known, *trust, *beat, *flags))
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


WRONG = {
    "another name": ("DNS:stranger.llm.svc", NAME, False, "wrong_name", f"that is not for {NAME}"),
    "another authority": (f"DNS:{NAME}", NAME, True, "untrusted", "of no authority that the router trusts (engine_ca)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_engines_with_a_wrong_certificate_get_nothing(tmp_path, case):
    """Their state says why in one clear sentence, and it is counted."""
    shown, name, is_strange, reason, said = WRONG[case]
    knows = Authority(tmp_path, "others") if is_strange else None
    with https_fleet(tmp_path, shown, name=name, knows=knows) as fleet:
        until(lambda: "certificate" in (fleet.state("decode-0")["why"] or ""))
        answer = fleet.post()

        assert answer.status_code in (502, 503)
        assert "127.0.0.1" not in answer.text
        assert f"shows a certificate {said}" in fleet.state("decode-0")["why"]
        until(lambda: f": shows a certificate {said}" in fleet.process.said)
        assert {key[1] for key in fleet.failures()} == {reason}
        assert not any(engine.log for engine in fleet.engines.values())
        assert "Traceback" not in fleet.process.said


def test_engines_may_want_a_certificate_of_the_router(tmp_path):
    """Without one their state says what is missing, and probes end without a traceback."""
    theirs = Authority(tmp_path, "theirs")
    asks = {"ssl_ca_certs": theirs.own.cert, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    with https_fleet(tmp_path, f"DNS:{NAME}", authority=theirs, **asks) as fleet:
        until(lambda: "certificate" in (fleet.state("decode-0")["why"] or ""))

        assert re.search(r"certificate (of the router )?\(engine_cert\)", fleet.state("decode-0")["why"])
        assert "Traceback" not in fleet.process.said
    own = theirs.sign("router")
    shown = ("--engine-cert", own.cert, "--engine-key", own.key)
    with https_fleet(tmp_path, f"DNS:{NAME}", *shown, authority=theirs, **asks) as fleet:
        assert fleet.post().json()["choices"][0]["text"] == expected_text(BODY)


@pytest.mark.parametrize(
    "text",
    ["", "*", "*.llm.svc", "https://engines.llm.svc", "engines.llm.svc:8100", "10.0.0.1", "::1", "a b", "a.svc."],
)
def test_only_a_dns_name_can_be_the_name_of_all(text):
    """An empty one would switch the check off in some libraries, and a star is for certificates."""
    with pytest.raises(ArgumentTypeError, match="is not a DNS name: write it without scheme"):
        read(OPTIONS["engine_server_name"].kind, text)
