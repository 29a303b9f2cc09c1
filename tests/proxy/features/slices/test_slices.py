"""A router whose engines are in two slices: which of them share requests, and what operators see of it."""

from contextlib import asynccontextmanager
from dataclasses import replace

import httpx

from pdrelay_proxy.app import build
from pdrelay_proxy.features.slices.settings import SlicePairing, SliceSettings
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import Sim
from pdrelay_tools.simulated.rules import expected_text
from support.sim import InMemory

KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0)
BODY = {"prompt": "once upon a time", "max_tokens": 4}
ROLES = {"p": "prefill", "d": "decode"}


@asynccontextmanager
async def sliced(pairing, *names, away=(), **settings):
    """Yield a client of a router, and its engines: ``a-p0`` is the prefill engine 0 of slice a; ``away``: no leg."""
    engines = {name: Sim(ROLES[name[2]]) for name in names}
    for name in away:
        engines[name].takes_legs = False
    prefill, decode = (tuple(f"{name}:80#slice={name[0]}" for name in names if name[2] == part) for part in ROLES)
    chosen = replace(OPEN, prefill=prefill, decode=decode, allowed_hosts=("*",), **settings)
    network = InMemory(engines)
    app = build(chosen.with_features(SliceSettings(pairing)), fabric=network.fabric).app
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with network.running(app), httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client, engines


async def ask(client):
    """Complete a prompt, which must be right; return which engines did it."""
    response = await client.post("/v1/completions", json=BODY)
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == expected_text(BODY)
    return response.headers["server-timing"]


async def metric(client, name):
    text = (await client.get("/metrics")).text
    return {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(name)}


async def rows(client):
    found = (await client.get("/instances", headers=KEY)).json()["instances"]
    return {row["id"]: row for row in found}


def served(engines):
    """Return the slices whose engines have had requests, by role."""
    return [{name[0] for name, sim in engines.items() if name[2] == part and sim.log} for part in ROLES]


async def test_an_engine_has_the_slice_that_an_operator_gives_it():
    """Lists, explanations and metrics show it."""
    async with sliced(SlicePairing.PREFER, "a-p0", "a-d0", "b-d0") as (client, _):
        found = await rows(client)
        question = {"path": "/v1/completions", "body": BODY}
        said = (await client.post("/instances/explain", json=question, headers=KEY)).json()
        await client.post("/instances/drain", json={"id": "decode-0"}, headers=KEY)
        crossing = (await client.post("/instances/explain", json=question, headers=KEY)).json()
        there = await metric(client, "pdrelay_slice_instances")

    assert {name: row["slice"] for name, row in found.items()} == {"prefill-0": "a", "decode-0": "a", "decode-1": "b"}
    assert (said["prefill_slice"], said["decode_slice"], said["slice_crossing"]) == ("a", "a", None)
    assert (crossing["prefill_slice"], crossing["decode_slice"]) == ("a", "b")
    assert crossing["slice_crossing"] == "draining"
    assert there == {
        'pdrelay_slice_instances{role="prefill",slice="a"}': 1,
        'pdrelay_slice_instances{role="decode",slice="a"}': 0,
        'pdrelay_slice_instances{role="prefill",slice="b"}': 0,
        'pdrelay_slice_instances{role="decode",slice="b"}': 1,
    }


async def test_required_slices_keep_their_blocks_when_a_decode_engine_cannot_be_reached():
    """The one in the other slice could read them, and must not."""
    names = ("a-p0", "a-d0", "b-d0")
    async with sliced(SlicePairing.REQUIRE, *names, away=["a-d0"], decode_only_fallback=False) as (client, engines):
        response = await client.post("/v1/completions", json=BODY)

    assert response.status_code == 502
    assert served(engines) == [{"a"}, set()]


async def test_preferred_slices_give_their_blocks_away_when_no_decode_engine_there_can_be_reached():
    """To read them across slices is better than to compute the prompt again."""
    async with sliced(SlicePairing.PREFER, "a-p0", "a-d0", "b-d0", away=["a-d0"]) as (client, engines):
        timing = [await ask(client) for _ in range(3)]
        crossings = await metric(client, "pdrelay_slice_crossings_total")

    assert served(engines) == [{"a"}, {"b"}]
    assert any("decode-0 unreachable" in one for one in timing)
    assert crossings['pdrelay_slice_crossings_total{reason="failed"}'] >= 1
