"""Engines that turn while they serve: the texts of one engine, whatever each of them is at the moment.

What is measured is printed: ``pytest -s tests/e2e/test_turn.py`` makes the numbers of docs/turning-roles.md.
"""

import threading
import time
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest

from support.cluster import Watch, engine_spec, nothing_held, start_engine, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import bodies, run
from xpyd_proxy.core.protocol.push import TransferMode
from xpyd_proxy.local.recipe import Connector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]

KEY = {"X-Api-Key": ADMIN_KEY}
# The times are long: only what is broken may take as long, and not a busy machine.
ARGS = ("--resume-streams", "true", "--health-check-interval", "0.5", "--move-timeout", "60", "--turn-timeout", "200")
OPTIONS = {
    "role": None,
    "connector": Connector.XPYD,
    "extra_connector_config": {"return_kv": True, "return_timeout": 10.0, "transfer_timeout": 10.0},
    "max_model_len": 4096,
    "kv_cache_mib": 512,
}
STREAMS, TOKENS = 8, 400


def is_thorough(_test, params):
    """Tell what is only for ``make test-thorough``: who moves prompts makes no difference to what turns."""
    return params.get("fleet_of") is TransferMode.PUSH


@pytest.fixture(scope="module", params=TransferMode, ids=str)
def fleet_of(request, fleet, model):
    """Engines that lend and take KV in both directions."""
    mode = request.param
    specs = {name: engine_spec(f"turn-{mode}-{name}", model, mode=mode, **OPTIONS) for name in ("a", "b", "c")}
    children = {name: start_engine(fleet, spec) for name, spec in specs.items()}
    fleet.wait_ready(list(children.values()), timeout_s=300)
    yield SimpleNamespace(**specs, mode=mode, specs=list(specs.values()), children=children, fleet=fleet)
    fleet.stop(*[child for child in children.values() if child in fleet.children])


@pytest.fixture
def router(fleet_of, start_router, request):
    """1P2D: a is P."""
    env, name = {"ADMIN_API_KEY": ADMIN_KEY}, request.node.name.split("[")[0][5:]
    url = start_router(
        f"router-turn-{fleet_of.mode}-{name}", [fleet_of.a], [fleet_of.b, fleet_of.c], args=ARGS, env=env
    )
    wait_until(lambda: all(row["version"] and row["connector"] for row in rows(url).values()), seconds=30, what="known")
    return url


def rows(url):
    found = httpx.get(f"{url}/instances", headers=KEY, trust_env=False, timeout=30).json()["instances"]
    return {row["id"]: row for row in found}


def turn(url, name, to):
    """Turn an engine, and return how many seconds that took."""
    start = time.monotonic()
    body = {"id": name, "to": to}
    response = httpx.post(f"{url}/instances/turn", json=body, headers=KEY, trust_env=False, timeout=30)
    assert response.status_code == 200, response.text
    wait_until(lambda: _serves(url, name, to), seconds=200, what=f"{name} serves {to}")
    return time.monotonic() - start


def counted(url, name):
    """What has become of turns, or of streams that were to move."""
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)}


def _serves(url, name, role):
    row = rows(url)[name]
    return row["role"] == role and row["turns_to"] is None


class Wave:
    """Streams that run beside what a test does."""

    def __init__(self, url, seed, salt):
        self._asked = list(bodies(STREAMS, TOKENS, seed=seed, salt=salt))
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self.streams = []
        self._thread.start()
        assert self._begun.wait(200), "the streams have not begun"

    def _run(self, url):
        self.streams = run(url, self._asked, self._begun.set, behind=20)

    def end(self, expected):
        """Wait for the end, and return what has become of the streams."""
        self._thread.join(300)
        return [one.verdict(other) for one, other in zip(self.streams, expected, strict=True)]


def test_engines_turn_while_they_serve(fleet_of, router):
    """D to P, P to D, and D to both, each with streams running; no token is lost, and no engine is restarted."""
    expected = {
        seed: run(fleet_of.a.base_url, bodies(STREAMS, TOKENS, seed=seed, salt=f"alone {seed}")) for seed in (1, 2)
    }
    took, found = [], []
    one = Wave(router, 1, "first")
    took.append(turn(router, "decode-0", "prefill"))
    two = Wave(router, 2, "second")
    took.append(turn(router, "prefill-0", "decode"))
    found += one.end(expected[1])
    three = Wave(router, 1, "third")
    took.append(turn(router, "decode-1", "both"))
    four = Wave(router, 2, "fourth")
    found += two.end(expected[2]) + three.end(expected[1]) + four.end(expected[2])
    for spec in fleet_of.specs:
        wait_until(lambda spec=spec: nothing_held(spec), seconds=30, what=f"{spec.name} is idle")
    with Watch(fleet_of.a) as a, Watch(fleet_of.b) as b, Watch(fleet_of.c) as c:
        found += Wave(router, 1, "fifth").end(expected[1])
    print(
        f"\n{fleet_of.mode}: {STREAMS} streams of {TOKENS} tokens in each of 5 waves: {dict(Counter(found))}; "
        f"D to P after {took[0]:.2f} s, P to D {took[1]:.2f} s, D to both {took[2]:.2f} s; "
        f"{counted(router, 'xpyd_turns')}"
    )

    assert Counter(found) == {"right": 5 * STREAMS}
    assert {name: row["role"] for name, row in rows(router).items()} == {
        "prefill-0": "decode",
        "decode-0": "prefill",
        "decode-1": "both",
    }
    granted, loads = "vllm:xpyd_leases_granted_total", "vllm:xpyd_loads_total"
    if fleet_of.mode is TransferMode.PULL:
        assert (a.delta(granted), b.delta(loads)) == (0, 0)
        assert b.delta(granted) + c.delta(granted) >= STREAMS
        assert a.delta(loads) + c.delta(loads) >= STREAMS
    assert sum(counted(router, "xpyd_turns").values()) == 3
