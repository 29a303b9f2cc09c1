"""An operator drains an engine, and its streams move at once."""

from dataclasses import replace

import httpx

from pdrelay_proxy.app import build
from pdrelay_proxy.settings import Settings
from support.sim import InMemory, router, sims

KEY = {"X-Api-Key": "sesame"}
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.0)


async def drain(client, name):
    response = await client.post("/instances/drain", json={"id": name, "move": True}, headers=KEY)
    return response.status_code, response.json()


async def test_streams_move_only_where_the_router_knows_their_tokens():
    """Else the operator hears what is missing, and nothing is drained."""
    async with router(sims(), OPEN) as client:
        status, said = await drain(client, "decode-0")
        instances = (await client.get("/instances", headers=KEY)).json()["instances"]
        states = {row["state"] for row in instances}

    assert status == 409
    assert "resume_streams" in said["detail"]
    assert "draining" not in states


async def test_streams_move_only_from_decode_engines():
    """A prefill engine finishes what it has."""
    async with router(sims(), replace(OPEN, resume_streams=True)) as client:
        status, said = await drain(client, "prefill-0")

    assert status == 400
    assert "has no streams" in said["detail"]


async def test_an_engine_that_moves_its_streams_says_so():
    """In the list, and so on the status page."""
    network = InMemory(sims(1, 2))
    settings = replace(OPEN, resume_streams=True, prefill=("p0:80",), decode=("d0:80", "d1:80"), allowed_hosts=("*",))
    built = build(settings, fabric=network.fabric)
    registry = built.live.registry
    transport = httpx.ASGITransport(built.app)
    async with network.running(built.app), httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        status, found = await drain(client, "decode-0")
        moving = list(registry.departures.moving)
        await client.post("/instances/undrain", json={"id": "decode-0"}, headers=KEY)

    assert status == 200
    assert [(row["state"], row["why"]) for row in found["instances"]] == [
        ("draining", "is to be drained, and its streams move")
    ]
    assert moving == ["decode-0"]
    assert not registry.departures.moving
