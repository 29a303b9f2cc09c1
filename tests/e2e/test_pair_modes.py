"""Engines that can pull and push, one pair of which reads slowly and another writes slowly: the router finds out.

What is measured is printed: ``pytest -s tests/e2e/test_pair_modes.py``.
"""

import os
import random
import time
from types import SimpleNamespace

import httpx
import pytest

from pdrelay_tools.local.recipe import Connector, Role, engine
from support.cluster import SOON, Watch, engine_spec, nothing_held, start_engine, wait_until
from support.fixtures import ADMIN_KEY
from support.questions import ask, client, differences, ids
from support.slow_memory import COMPILER, NEEDED, slow

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(500),
    pytest.mark.thorough,  # two minutes, most of it for engines that no nursery can bear: what is loaded before libc
    pytest.mark.skipif(COMPILER is None, reason=NEEDED),
]

KEY = {"X-Api-Key": ADMIN_KEY}
SLOW_MB_PER_S = 2.0  # the KV of a prompt of 200 tokens has 0.8 MB


@pytest.fixture(scope="module")
def autos(fleet, model):
    """2P2D: d0 reads slowly, and p1 writes slowly."""
    slow_ways = {"p0": None, "p1": "WRITE", "d0": "READ", "d1": None}
    specs = {}
    children = []
    for name, way in slow_ways.items():
        specs[name] = engine_spec(
            f"auto-{name}",
            model,
            role=Role.PREFILL if name[0] == "p" else Role.DECODE,
            connector=Connector.PDRELAY,
            extra_connector_config={"mode": "auto"},
            extra_env=slow(**{way: SLOW_MB_PER_S}) if way else {},
        )
        start = fleet.start(engine(specs[name], os.environ)) if way else start_engine(fleet, specs[name])
        children.append(start)
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(**specs)
    fleet.stop(*children)


def modes(url):
    """Return the rows of all pairs, by prefill and decode engine."""
    rows = httpx.get(f"{url}/pairs", headers=KEY, trust_env=False).json()["pairs"]
    return {(row["prefill"], row["decode"]): row for row in rows}


def are_known(url):
    found = httpx.get(f"{url}/instances", headers=KEY, trust_env=False).json()["instances"]
    return all(one["mode"] == "auto" for one in found)


def test_each_pair_gets_the_faster_way(autos, start_router, reference_answer):
    """Both asymmetric pairs are found out, and every text is a single engine's, whichever way its KV went."""
    dice = random.Random(5)
    env = {"ADMIN_API_KEY": ADMIN_KEY}
    args = ("--health-check-interval", "0.5")
    prefill, decode = [autos.p0, autos.p1], [autos.d0, autos.d1]
    url = start_router("router-auto", prefill, decode, args=args, env=env)
    wait_until(lambda: are_known(url), seconds=30, what="the router has seen that all engines can do either")

    wrong = {}
    asked = 0
    with Watch(autos.d0) as d0, Watch(autos.d1) as d1, client(url) as api:
        deadline = time.monotonic() + 120
        while asked < 16 or not settled(url):
            assert time.monotonic() < deadline, modes(url)
            prompt = tuple(dice.randrange(10, 500) for _ in range(dice.randrange(40, 400)))
            question = ids(prompt, stream=True)
            if found := differences(ask(api, question), reference_answer(question)):
                wrong[str(question)] = found
            asked += 1

    rows = modes(url)
    for pair, row in sorted(rows.items()):
        print(
            pair, row["mode"], f"pull {row['pull_s']:.3f} s, push {row['push_s']:.3f} s,", row["handovers"], "requests"
        )
    assert wrong == {}
    assert rows["prefill-0", "decode-0"]["mode"] == "push"
    assert rows["prefill-1", "decode-1"]["mode"] == "pull"
    assert d0.delta("vllm:pdrelay_loads_total") + d1.delta("vllm:pdrelay_loads_total") == asked
    for spec in (*prefill, *decode):
        wait_until(lambda spec=spec: nothing_held(spec), seconds=SOON, what=f"{spec.name} holds nothing")


def settled(url):
    """Tell whether the two pairs that are slow in one way have been found out."""
    rows = modes(url)
    slow = [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
    return all(pair in rows and rows[pair]["mode"] in ("pull", "push") for pair in slow)
