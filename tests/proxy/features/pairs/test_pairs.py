"""A router whose engines are well, but for two that cannot meet: what it does, and what operators see."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.loads import FAILURE_TEXT
from pdrelay_tools.simulated.rules import expected_text
from support.sim import router, sims

KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0, engine_metrics_interval_s=0.01)
BODY = {"prompt": "once upon a time", "max_tokens": 4}
CUT = ("prefill-0", "decode-0")
PATIENCE_S = 30.0


class World:
    """A client of a router in front of simulated engines, and the router's clock."""

    def __init__(self):
        self.now = 1000.0
        self.client = self.engines = None

    async def page(self):
        """Return what the status page shows of pairs."""
        shown = (await self.client.get("/stats")).json()["features"]
        (part,) = [part for part in shown if part["title"] == "Pairs"]
        return part

    async def ask(self, **fields):
        """Complete a prompt, which must be right; return the engines of the request."""
        response = await self.client.post("/v1/completions", json=BODY | fields)
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            assert response.json()["choices"][0]["text"] == expected_text(BODY)
        timing = dict(part.split(";desc=", 1) for part in response.headers["server-timing"].split(", "))
        return tuple(timing[leg].split('"')[1] if leg in timing else None for leg in ("prefill", "decode"))

    async def until_resting(self, count=1):
        """Send requests until the router has seen enough; return the pairs that they went to."""
        used = []
        async with asyncio.timeout(PATIENCE_S):
            while (await self.metric("pdrelay_pairs_resting")) != count:
                used.append(await self.ask())
                await asyncio.sleep(0.02)
        return used

    async def until_trial_has_failed(self):
        """The failure of a trial is seen when the decode engine's counters are read next."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.pairs())[1][CUT]["state"] != "resting":
                await asyncio.sleep(0.02)

    async def metric(self, name):
        text = (await self.client.get("/metrics")).text
        values = [line.split(" ")[1] for line in text.splitlines() if line.split(" ")[0] == name]
        return float(values[0]) if values else None

    async def pairs(self):
        found = (await self.client.get("/pairs", headers=KEY)).json()
        return found, {(row["prefill"], row["decode"]): row for row in found["pairs"]}


@asynccontextmanager
async def world(x=2, y=2, settings=OPEN, *, shows=True, recomputes=True):
    """Yield one whose first engines cannot meet."""
    found = World()
    found.engines = sims(x, y)
    for name, sim in found.engines.items():
        sim.loads.are_shown, sim.loads.recomputes = shows, recomputes
        if name == "d0":
            sim.loads.unmet[found.engines["p0"].engine_id] = "handshake"
    async with router(found.engines, settings, lambda: found.now) as found.client:
        yield found


async def test_requests_go_round_a_pair_that_cannot_meet():
    """Each of its requests would be computed twice, though all answers are right and have status 200."""
    async with world() as running:
        before = await running.until_resting()
        after = [await running.ask() for _ in range(12)]

    assert CUT in before
    assert set(after) == {("prefill-0", "decode-1"), ("prefill-1", "decode-0"), ("prefill-1", "decode-1")}


async def test_operators_see_the_pair_and_why():
    """In the list of pairs, the metrics, the status page and in explanations."""
    async with world() as running:
        await running.until_resting()
        found, rows = await running.pairs()
        failures = await running.metric('pdrelay_pair_failures_total{reason="handshake"}')
        page = await running.page()
        question = {"path": "/v1/completions", "body": BODY}
        said = (await running.client.post("/instances/explain", json=question, headers=KEY)).json()

    row = rows[CUT]
    assert (row["state"], row["reason"], row["rest_s"]) == ("resting", "handshake", 30.0)
    assert row["failed_in_a_row"] >= 3
    assert rows["prefill-1", "decode-1"]["state"] == "well"
    assert (found["resting"], found["known"]) == (1, 4)
    assert failures >= 3
    assert page["state"] == "4 used lately, 1 resting"
    assert page["rows"][0][:3] == [*CUT, "resting: handshake, tried again in 30 s"]
    assert said["resting_pairs"] == [{"prefill": "prefill-0", "decode": "decode-0", "reason": "handshake"}]
    assert (said["prefill"], said["decode"]) != CUT


async def test_operators_see_the_cause_before_the_pair_rests(caplog):
    """With another secret than the prefill engine's not one byte moves, and every answer is right and has status 200.

    The decode engine alone knows why. It may have known before this router began.
    """
    async with world(1, 1, replace(OPEN, decode_only_fallback=False)) as running:
        p0, d0 = running.engines["p0"], running.engines["d0"]
        d0.loads.unmet[p0.engine_id] = "secret"
        async with asyncio.timeout(PATIENCE_S):
            while (row := (await running.pairs())[1].get(CUT)) is None or row["why"] is None:
                await running.ask()
                await asyncio.sleep(0.02)
        response = await running.client.post("/v1/completions", json=BODY)
        shown = (await running.client.get(f"/requests/{response.headers['x-request-id']}", headers=KEY)).json()
        d0.loads.unmet.clear()
        async with asyncio.timeout(PATIENCE_S):
            while (await running.pairs())[1][CUT]["why"] is not None:
                await asyncio.sleep(0.02)
        healed = await running.client.post("/v1/completions", json=BODY)

    sentence = f"decode-0 loads no KV of prefill-0 (secret): {FAILURE_TEXT.format('secret')}"
    assert (row["state"], row["reason"], row["why"]) == ("failing", "secret", FAILURE_TEXT.format("secret"))
    assert [line for line in caplog.messages if "loads no KV" in line] == [sentence]
    assert 'kv;desc="not loaded: secret"' in response.headers["server-timing"].split(", ")
    assert sentence in shown["requests"][0]["notes"]
    assert "not loaded" not in healed.headers["server-timing"]


async def test_operators_see_how_fast_kv_moves():
    """The slow one of many pairs is a link, a driver or a setting; nothing else shows which one it is."""
    async with world(1, 1) as running:
        running.engines["d0"].loads.unmet.clear()
        async with asyncio.timeout(PATIENCE_S):
            while (row := (await running.pairs())[1].get(CUT)) is None or row["bytes_per_s"] is None:
                await running.ask()
        page = await running.page()

    # Not the same number: another transfer may have been read in between.
    assert row["bytes_per_s"] == pytest.approx(2e9)
    assert page["rows"][0][page["columns"].index("KV rate")] == "2 GB/s"


async def test_pairs_are_for_operators():
    """Like all that shows who is there."""
    async with world() as running:
        assert (await running.client.get("/pairs")).status_code == 401
