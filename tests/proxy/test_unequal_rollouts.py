"""Rollouts of 4P/16D and 16P/4D while clients ask: a whole router in memory, and simulated engines."""

import asyncio
import re
from collections import Counter

import pytest

from support.sim import router, sims
from xpyd_proxy.settings import Settings
from xpyd_proxy.testing.rules import expected_text

OPEN = Settings(admin_key="secret", health_check_interval_s=0.0)
BURST = 24  # requests at the same time, between two pods that come or go


async def _change(client, verb, body):
    response = await client.post(f"/instances/{verb}", json=body, headers={"x-api-key": "secret"})
    assert response.status_code == 200, response.text


class Fleet:
    """The instances of a router, and of which revision each is."""

    def __init__(self, client):
        self._client = client
        self.revisions = {}  # by id
        self.at = {}  # id by engine
        self._added = Counter()

    async def add(self, name, revision):
        role = "prefill" if name[0] == "p" else "decode"
        await _change(self._client, "add", {"type": role, "instance": f"{name}:80#revision={revision}"})
        rows = (await self._client.get("/instances", headers={"x-api-key": "secret"})).json()["instances"]
        (one,) = [row["id"] for row in rows if row["role"] == role and row["address"] == f"{name}:80"]
        self.revisions[one], self.at[name] = revision, one

    async def remove(self, name):
        await _change(self._client, "remove", {"id": self.at[name]})


async def ask(client, number):
    body = {"prompt": f"question {number}", "max_tokens": 3}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == expected_text(body)
    return response.headers["server-timing"]


@pytest.mark.parametrize(("x", "y"), [(4, 16), (16, 4)])
async def test_no_request_fails_and_no_pair_is_mixed(x, y):
    """Pods of both pools take equally long, so the smaller pool is through when the larger one has begun."""
    old = {role: [f"{role}{n}" for n in range(count)] for role, count in (("p", x), ("d", y))}
    new = {role: [f"{role}{n}" for n in range(count, 2 * count)] for role, count in (("p", x), ("d", y))}
    timings, alone = [], Counter()
    async with router(sims(2 * x, 2 * y), OPEN) as client:
        fleet = Fleet(client)
        rows = (await client.get("/instances", headers={"x-api-key": "secret"})).json()["instances"]
        for row in rows:
            await _change(client, "remove", {"id": row["id"]})
        for name in (*old["p"], *old["d"]):
            await fleet.add(name, "v1")
        for step in range(max(x, y)):
            for role in ("p", "d"):
                if step >= len(old[role]):
                    continue
                asking = [asyncio.create_task(ask(client, f"{step} {role} {n}")) for n in range(BURST)]
                await fleet.add(new[role][step], "v2")
                await fleet.remove(old[role][step])
                timings += await asyncio.gather(*asking)
        stats = (await client.get("/stats")).json()

    assert len(timings) == (x + y) * BURST
    for timing in timings:
        engines = re.findall(r'(?:prefill|decode);desc="([^"]+)"', timing)
        assert len({fleet.revisions[name] for name in engines}) == 1
        alone.update(re.findall(r'reason;desc="([^"]+)"', timing))
    assert set(alone) == {"few_matching_engines"}
    assert stats["failures"] == []
    assert stats["groups"] == []


async def test_a_fleet_of_mixed_revisions_shows_on_the_page():
    """No prefill engine fits a decode engine: requests are served, alone; the page says why, and a metric how many."""
    async with router(sims(2, 2), OPEN) as client:
        fleet = Fleet(client)
        for row in (await client.get("/instances", headers={"x-api-key": "secret"})).json()["instances"]:
            await _change(client, "remove", {"id": row["id"]})
        for name, revision in (("p0", "v1"), ("p1", "v1"), ("d0", "v2"), ("d1", "v3")):
            await fleet.add(name, revision)
        timing = await ask(client, 1)
        stats = (await client.get("/stats")).json()
        metrics = (await client.get("/metrics")).text

    assert 'reason;desc="no_matching_prefill_engine"' in timing
    assert [(one["name"], one["prefill"], one["decode"]) for one in stats["groups"]] == [
        ("no prefill engine fits", 0, 2),
        ("no decode engine fits", 2, 0),
    ]
    assert 'xpyd_unpaired_instances{role="prefill"} 2.0' in metrics
    assert 'xpyd_unpaired_instances{role="decode"} 2.0' in metrics
