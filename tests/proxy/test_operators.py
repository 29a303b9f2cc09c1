"""What operators choose, and what they are told: against the port of a router process, as its clients meet it."""

import base64
import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest

from support.router_process import KEY, RouterProcess, router_processes
from support.sim import serving, sims
from xpyd_proxy.local.sim import Fault, FaultKind, Sim

PATH = "/v1/completions"
BODY = {"prompt": "once upon a time", "max_tokens": 3}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class Running:
    """A router process and the engines behind it."""

    router: RouterProcess
    engines: dict[str, Sim]
    at: dict[str, str]  # host:port of the engines

    def post(self, path=PATH, body=BODY, **options):
        return httpx.post(self.router.url + path, **{"json": body, "timeout": 30} | options)

    def get(self, path, **options):
        return httpx.get(self.router.url + path, timeout=30, **options)

    def legs(self):
        return [entry for sim in self.engines.values() for entry in sim.log if entry.path == PATH]


@contextmanager
def running(folder, *args, env=None, **options) -> Generator[Running]:
    engines = sims(**options)
    with ExitStack() as stack:
        at = {name: stack.enter_context(serving(sim)) for name, sim in engines.items()}
        known = ["--prefill", at["p0"], "--decode", at["d0"]]
        (router,) = stack.enter_context(router_processes(folder, 1, *known, *args, env=env))
        yield Running(router, engines, at)


@pytest.mark.parametrize("forwards", ["false", "true"])
def test_engines_see_the_key_of_a_client_only_if_the_operator_says_so(tmp_path, forwards):
    """It is a key of this router: who has it may ask here."""
    with running(tmp_path, "--forward-client-key", forwards) as fleet:
        answer = fleet.post(headers=bearer("client-key"))

        shown = {entry.headers.get("authorization") for entry in fleet.legs()}
    assert answer.status_code == 200
    assert shown == {"Bearer client-key" if forwards == "true" else None}


KEYS = "team-a:sk-a\nteam-b:sk-b\nprometheus:sk-p\n"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return str(path)


def salts(fleet, paths=(PATH,)):
    """Of each leg, in order."""
    return [json.loads(e.body).get("cache_salt") for s in fleet.engines.values() for e in s.log if e.path in paths]


def test_what_one_key_sends_is_not_found_in_the_cache_of_another(tmp_path, keys):
    """The time of the first token would tell whether somebody has sent this beginning before."""
    env = {"XPYD_CACHE_SALT_SECRET": "of the fleet"}
    args = ("--api-keys-file", keys, "--cache-salt-per-key", "true")
    with running(tmp_path, *args, env=env) as fleet:
        for key, body in (("sk-a", BODY), ("sk-b", BODY), ("sk-a", BODY | {"cache_salt": "mine"}), ("sk-a", BODY)):
            assert fleet.post(body=body, headers=bearer(key)).status_code == 200
        solo = fleet.post(body=BODY | {"n": 2}, headers=bearer("sk-a"))
        odd = fleet.post(body=BODY | {"cache_salt": 3}, headers=bearer("sk-a"))
        fleet.post("/v1/embeddings", {"input": "a"}, headers=bearer("sk-a"))

        prefill = salts(fleet)[:4]
        decode = salts(fleet)[4:8]
        of_a = prefill[0]
        assert prefill == decode
        assert prefill[3] == of_a
        assert len({*prefill, None, "mine"}) == 5
        assert solo.status_code == 200
        assert salts(fleet)[8] == of_a
        assert salts(fleet, ("/v1/embeddings",)) == [of_a]
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "cache_salt")


def test_two_routers_of_a_fleet_give_a_key_the_same_salt(tmp_path, keys):
    """Else a cache would help only those who meet the same router again."""
    found = []
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        with running(folder, "--api-keys-file", keys, "--cache-salt-per-key", "true") as fleet:
            assert fleet.post(headers=bearer("sk-a")).status_code == 200
            found += salts(fleet)

    assert len(set(found)) == 1
    assert None not in found


def test_salts_without_keys_are_refused(tmp_path):
    """All clients would be one, which is not what was asked for."""
    said = subprocess.run(
        [sys.executable, "-m", "xpyd_proxy.cli", "serve", "--port", "0", "--cache-salt-per-key", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert said.returncode == 2
    assert "cache_salt_per_key needs api_keys_file" in said.stderr


@pytest.mark.parametrize("shown", ["true", "false"])
def test_server_timing_is_left_out_if_the_operator_says_so(tmp_path, shown):
    """It tells a client the milliseconds of a prefill, and how the engines are named."""
    with running(tmp_path, "--server-timing", shown) as fleet:
        answers = [fleet.post(), fleet.post(body=BODY | {"stream": True}), fleet.post(body=BODY | {"n": 2})]
        answers.append(fleet.post(body=BODY | {"kv_transfer_params": {"a": 1}}))

    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert ["server-timing" in answer.headers for answer in answers[:3]] == [shown == "true"] * 3
    assert "server-timing" not in answers[3].headers


LOOKS = ("/", "/status.json", "/metrics")


def basic(password):
    return {"authorization": "Basic " + base64.b64encode(b"anybody:" + password.encode()).decode()}


def test_what_shows_the_fleet_needs_a_key_where_clients_do(tmp_path, keys):
    """It names engines, and how busy each is. Prometheus sends a bearer token, a browser asks for a password."""
    with running(tmp_path, "--api-keys-file", keys) as fleet:
        bare = [fleet.get(path) for path in LOOKS]
        wrong = [
            fleet.get(path, headers=shown)
            for path in LOOKS
            for shown in (bearer("sk"), basic("sk"), {"x-api-key": "sk"})
        ]
        right = [fleet.get(path, headers=shown) for path in LOOKS for shown in (bearer("sk-p"), KEY)]
        browser = [fleet.get(path, headers=basic("sk-p")).status_code for path in LOOKS]
        generating = fleet.post(headers=basic("sk-p"))
        probes = [fleet.get(path).status_code for path in ("/health", "/ready")]

    assert {answer.status_code for answer in bare + wrong} == {401}
    assert [answer.headers["www-authenticate"] for answer in bare] == ['Basic realm="xpyd", Bearer'] * 2 + ["Bearer"]
    assert {answer.status_code for answer in right} == {200}
    assert browser == [200, 200, 401]
    assert generating.status_code == 401  # a browser sends passwords with requests that other pages make
    assert probes == [200, 200]


def test_the_operator_may_open_what_shows_the_fleet(tmp_path, keys):
    """Behind a network policy, say, for a scraper that cannot send a token."""
    with running(tmp_path, "--api-keys-file", keys, "--open-metrics", "true") as fleet:
        assert [fleet.get(path).status_code for path in LOOKS] == [200] * 3
        assert fleet.post().status_code == 401


def test_without_keys_they_are_open(tmp_path):
    """As all else is."""
    with running(tmp_path) as fleet:
        assert [fleet.get(path).status_code for path in LOOKS] == [200] * 3


def test_failures_do_not_name_a_request(tmp_path):
    """Who may see the page may not see which requests there are: it shows how an id begins, to find it in the log."""
    with running(tmp_path) as fleet:
        for sim in fleet.engines.values():
            sim.inject(Fault(FaultKind.DROP))
        answer = fleet.post()
        failures = fleet.get("/status.json").json()["failures"]

    ours = answer.headers["x-request-id"]
    assert answer.status_code == 502
    assert failures
    assert {one["request"] for one in failures} == {ours[:13] + "..."}
