"""Engines that turn while clients are served: over HTTP, with simulated engines that take legs of both kinds."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.rules import expected_text
from support.sim import router, sims

KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0, circuit_breaker_failures=3)
PATH = "/v1/completions"


async def turn(client, name, to, *, status=200, **more):
    response = await client.post("/instances/turn", json={"id": name, "to": to} | more, headers=KEY)
    assert response.status_code == status, response.text
    return response.json()


async def rows(client):
    found = (await client.get("/instances", headers=KEY)).json()["instances"]
    return {row["id"]: row for row in found}


async def turned(client, **wanted):
    """Wait until engines serve what they should; prefill_0 stands for prefill-0."""
    names = {name.replace("_", "-"): role for name, role in wanted.items()}
    async with asyncio.timeout(20):
        while True:
            found = await rows(client)
            if all(found[name]["role"] == role and found[name]["turns_to"] is None for name, role in names.items()):
                return found
            await asyncio.sleep(0.01)


async def metrics(client):
    lines = (await client.get("/metrics")).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def kinds(sim, since=0):
    """Count the legs of an engine by their role."""
    legs = [json.loads(entry.body) for entry in sim.log[since:]]
    return Counter(
        "prefill" if (leg.get("kv_transfer_params") or {}).get("do_remote_decode") else "decode" for leg in legs
    )


class Load:
    """Clients that ask one thing after the other until they are told to stop; every answer is looked at."""

    def __init__(self, client, count=6):
        self._client, self._count = client, count
        self._over = asyncio.Event()
        self.served = 0
        self.wrong = []

    async def _ask(self, number):
        asked = 0
        while not self._over.is_set():
            asked += 1
            stream = bool((asked + number) % 2)
            body = {"prompt": f"client {number} asks {asked}", "max_tokens": 6, "stream": stream}
            response = await self._client.post(PATH, json=body)
            text = response.text
            if response.status_code == 200:
                pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                choices = [piece["choices"] for piece in pieces] if stream else [response.json()["choices"]]
                text = "".join(one["text"] for some in choices for one in some)
            if text != expected_text(body):
                self.wrong.append((response.status_code, text))
            self.served += 1

    async def more(self, count=30):
        """Wait until so many more are served."""
        wanted = self.served + count
        async with asyncio.timeout(30):
            while self.served < wanted:
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def running(self):
        tasks = [asyncio.create_task(self._ask(number)) for number in range(self._count)]
        try:
            yield self
        finally:
            self._over.set()
            await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("pull", PolicyName.ROUND_ROBIN),
        ("push", PolicyName.ROUND_ROBIN),
        ("pull", PolicyName.LEAST_LOADED),
        ("push", PolicyName.PREFIX),
        ("pull", "expected_ttft"),
    ],
)
async def test_no_request_is_lost_and_none_is_on_the_wrong_side(mode, policy):
    """Under load one engine becomes P, another D, a third both, and all of them again what they were."""
    engines = sims(2, 3, kv_both=True, mode=mode, token_s=0.002)
    settings = Settings(
        admin_key="sesame", health_check_interval_s=0.0, prefill_policy=policy, decode_policy=policy,
        session_names=(), min_split_new_bytes=0,
    )  # fmt: skip
    async with router(engines, settings) as client, Load(client).running() as load:
        await load.more()
        await turn(client, "decode-0", "prefill")
        await turned(client, decode_0="prefill")
        await turn(client, "prefill-0", "decode")
        await turn(client, "decode-1", "both")
        await turned(client, prefill_0="decode", decode_1="both")
        since = {name: len(sim.log) for name, sim in engines.items()}
        await load.more(60)
        seen = {name: kinds(sim, since[name]) for name, sim in engines.items()}
        await turn(client, "decode-0", "decode")
        await turn(client, "prefill-0", "prefill")
        await turn(client, "decode-1", "decode")
        await turned(client, decode_0="decode", prefill_0="prefill", decode_1="decode")
        since = {name: len(sim.log) for name, sim in engines.items()}
        await load.more(60)
        again = {name: set(kinds(sim, since[name])) for name, sim in engines.items()}

    assert not load.wrong
    assert {name: sim.violations for name, sim in engines.items() if sim.violations} == {}
    sides = {"p0": "d", "p1": "p", "d0": "p", "d1": "pd", "d2": "d"}  # a policy may have no use for one of them
    wrong = {name: seen[name] for name, side in sides.items() if {kind[0] for kind in seen[name]} - set(side)}
    assert wrong == {}
    assert {name: kinds for name, kinds in again.items() if {kind[0] for kind in kinds} - {name[0]}} == {}
    if policy is PolicyName.ROUND_ROBIN:
        assert {name: {kind[0] for kind in seen[name]} for name in sides} == {n: set(side) for n, side in sides.items()}
        assert all(again.values())


async def test_list_metrics_page_and_explain_agree():
    """An engine that is both is in both pools under one id; one that has turned is named by what it was added as."""
    engines = sims(1, 2, kv_both=True)
    async with router(engines, OPEN) as client:
        await turn(client, "decode-0", "both")
        await turn(client, "decode-1", "prefill")
        found = await turned(client, decode_0="both", decode_1="prefill")
        counted = await metrics(client)
        stats = (await client.get("/stats")).json()
        question = {"path": PATH, "body": {"prompt": "x", "max_tokens": 5}}
        explained = [(await client.post("/instances/explain", json=question, headers=KEY)).json() for _ in range(3)]
        named = {"type": "decode", "instance": found["decode-1"]["address"], "to": "decode"}
        by_address = await client.post("/instances/turn", json=named, headers=KEY)

    assert {name: (row["role"], row["declared"]) for name, row in found.items()} == {
        "prefill-0": ("prefill", "prefill"),
        "decode-0": ("both", "decode"),
        "decode-1": ("prefill", "decode"),
    }
    assert counted['pdrelay_turns_total{outcome="turned",to="both"}'] == 1
    states = {name for name, value in counted.items() if name.startswith("pdrelay_instance_state") and value}
    assert {name.partition("state=")[0].partition("role=")[2] for name in states if "decode-0" in name} == {
        '"prefill",',
        '"decode",',
    }
    assert {one["id"]: one["role"] for one in stats["instances"]}["decode-0"] == "both"
    assert {(one["prefill"], one["decode"]) for one in explained} <= {
        ("prefill-0", "decode-0"),
        ("decode-1", "decode-0"),
    }
    assert by_address.json()["instances"][0]["id"] == "decode-1"


async def test_an_engine_that_has_turned_gets_the_key_of_the_pool_it_came_from():
    """Its process was started with that one."""
    engines = sims(1, 2, kv_both=True)
    settings = Settings(
        admin_key="sesame", health_check_interval_s=0.0, prefill_api_key="of-prefill", decode_api_key="of-decode"
    )
    async with router(engines, settings) as client:
        await turn(client, "decode-0", "prefill")
        await turned(client, decode_0="prefill")
        since = len(engines["d0"].log)
        for _ in range(4):
            await client.post(PATH, json={"prompt": "x", "max_tokens": 2})

    assert {entry.headers["authorization"] for entry in engines["d0"].log[since:]} == {"Bearer of-decode"}
    assert {entry.headers["authorization"] for entry in engines["p0"].log} == {"Bearer of-prefill"}
