"""Rollouts of 4P/16D and 16P/4D while clients ask: a whole router in memory, and simulated engines.

core/routing/test_share_bound.py has the bound of every policy.
"""

import asyncio
import re
from collections import Counter
from dataclasses import replace

import pytest

from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.rules import expected_text
from support.sim import router, sims

OPEN = Settings(admin_key="secret", health_check_interval_s=0.0)
BURST = 16  # requests at the same time: while a pod comes or goes, and of what comes in between
CALM = 160  # requests between two steps: ten for each engine of the larger pool
EVERY = 4  # pods that have gone until there is a calm
MOST = 1.5  # times its fair share that an engine may get
WORK = 2.5  # times the same that a D does where prompts that it computes alone count as requests do
EACH, BEYOND = 1.45, 8  # what session and prefix keep to with so few requests: docs/instances.md


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
    response = await client.post("/v1/completions", json=body, headers={"X-Session-Id": f"s{number}"})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == expected_text(body)
    return response.headers["server-timing"]


# The sizes of both pools, and how long a pod of each takes to start. With equal times the smaller pool is through when
# the larger one has begun.
ROLLOUTS = [((4, 16), (1, 1)), ((4, 16), (1, 4)), ((16, 4), (1, 1)), ((16, 4), (4, 1))]


def changes(sizes, startups):
    """List which pod comes or goes, by Deployments that surge by one: the old pod goes when the new one has come."""
    turns = [(startups[side] * (n + 1), side, n) for side in (0, 1) for n in range(sizes[side])]
    found = [(at + late, what, "pd"[side], n) for at, side, n in turns for late, what in ((0, "come"), (0.1, "go"))]
    return [one[1:] for one in sorted(found)]


def legs(timings):
    """Return the engines of all legs, of prefill and of decode."""
    return [re.findall(rf'{role};desc="([^"]+)"', " ".join(timings)) for role in ("prefill", "decode")]


def shares(timings, sizes):
    """Return how many times its fair share the busiest engine of each pool got, and its requests beyond the promise."""
    requests = len(timings)
    most = [max(Counter(names).values(), default=0) for names in legs(timings)]
    return [(count * size / requests, count - EACH * requests / size) for count, size in zip(most, sizes, strict=True)]


def work(timings, sizes):
    """Return how many times the mean of its pool the busiest D does; a prompt that it computes alone is work, too."""
    alone = [timing for timing in timings if "prefill;desc" not in timing]
    counts = Counter(legs(timings)[1]) + Counter(legs(alone)[1])
    return max(counts.values()) * sizes[1] / len(timings)


CASES = [("round_robin", *one) for one in ROLLOUTS]
CASES += [("least_loaded", *ROLLOUTS[0]), ("session", *ROLLOUTS[0]), ("prefix", *ROLLOUTS[2])]


@pytest.mark.parametrize(("policy", "sizes", "startups"), CASES, ids=str)
@pytest.mark.slow  # twenty engines come and go under each policy
async def test_no_request_fails_no_pair_is_mixed_and_no_engine_gets_far_more_than_its_share(policy, sizes, startups):
    """One pod after the other, with requests while it comes, while its predecessor goes, and in between."""
    timings = []
    calms = []
    windows = []
    gone = 0
    settings = replace(OPEN, prefill_policy=PolicyName(policy), decode_policy=PolicyName(policy))
    async with router(sims(*(2 * size for size in sizes)), settings) as client:
        fleet = Fleet(client)
        rows = (await client.get("/instances", headers={"x-api-key": "secret"})).json()["instances"]
        for row in rows:
            await _change(client, "remove", {"id": row["id"]})
        size_of = dict(zip("pd", sizes, strict=True))
        for role, size in size_of.items():
            for n in range(size):
                await fleet.add(f"{role}{n}", "v1")
        for step, (what, role, n) in enumerate(changes(sizes, startups)):
            asking = [asyncio.create_task(ask(client, f"{step} {one}")) for one in range(BURST)]
            if what == "come":
                await fleet.add(f"{role}{n + size_of[role]}", "v2")
            else:
                await fleet.remove(f"{role}{n}")
            timings += await asyncio.gather(*asking)
            gone += what == "go"
            if what == "go" and gone % EVERY == 0:
                calm = [
                    timing
                    for first in range(BURST, BURST + CALM, BURST)
                    for timing in await asyncio.gather(*[ask(client, f"{step} {first + i}") for i in range(BURST)])
                ]
                calms.append(calm)
                windows.append(timings[sum(map(len, windows)) :] + calm)  # with the bursts since the calm before
                timings += calm
        stats = (await client.get("/stats")).json()

    assert len(timings) == sum(sizes) * (2 * BURST + CALM // EVERY) == sum(map(len, windows))
    alone = Counter()
    for timing in timings:
        engines = re.findall(r'(?:prefill|decode);desc="([^"]+)"', timing)
        assert len({fleet.revisions[name] for name in engines}) == 1
        alone.update(re.findall(r'reason;desc="([^"]+)"', timing))
    assert set(alone) == {"few_matching_engines"}
    found = [shares(one, sizes) for one in (*calms, *windows)]
    if policy in {"round_robin", "least_loaded"}:
        assert max(share for step in found for share, _ in step) <= MOST
    else:
        assert max(beyond for step in found for _, beyond in step) <= BEYOND
    assert max(work(one, sizes) for one in calms) <= WORK
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
    assert 'pdrelay_unpaired_instances{role="prefill"} 2.0' in metrics
    assert 'pdrelay_unpaired_instances{role="decode"} 2.0' in metrics
