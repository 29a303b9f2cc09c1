"""Engines that come, go and fail while requests run: nobody notices. Real sockets, simulated engines."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest

from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from pdrelay_tools.simulated.rules import expected_text
from support.sim import cluster, serving, sims, until_async

pytestmark = pytest.mark.edges


KEY = {"X-Api-Key": "sesame"}
# Engines are judged by what they answer, and not by how busy this machine is.
OPEN = Settings(admin_key="sesame", health_check_interval_s=0.5, health_check_timeout_s=20.0, ejection_time_s=60.0)
POLICIES = [replace(OPEN, prefill_policy=policy, decode_policy=policy) for policy in [*PolicyName, *feature_policies()]]


async def ask(client, number):
    """Ask, and return what is wrong with the answer; None: nothing."""
    body = {"prompt": f"question {number}", "max_tokens": 4}
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return response.status_code, response.text, response.headers.get("server-timing")
    text = response.json()["choices"][0]["text"]
    return None if text == expected_text(body) else ("other text", text)


async def stream(address, number):
    """Ask for a stream on a plain socket (100 of them in httpx take most of a processor); return what is wrong."""
    body = {"prompt": f"question {number}", "max_tokens": 2, "stream": True}
    raw = json.dumps(body).encode()
    host = address.split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(*host)
    writer.write(head.encode() + raw)
    received = (await reader.read()).decode()
    writer.close()
    events = [line[6:] for line in received.splitlines() if line.startswith("data: {")]
    texts = [json.loads(event)["choices"][0]["text"] for event in events if '"choices"' in event]
    is_good = received.startswith("HTTP/1.1 200") and "data: [DONE]\n\n" in received
    return None if is_good and "".join(texts) == expected_text(body) else received


def client_of(cluster):
    # Connections are not kept: one that idles for the router's 5 s may be closed just when the next request is sent.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=f"http://{cluster.router}", timeout=20, trust_env=False, limits=limits)


async def ask_many(client, count, *, at_once=16):
    """Ask many questions, some at the same time; return what was wrong."""
    places = asyncio.Semaphore(at_once)

    async def one(number):
        async with places:
            return await ask(client, number)

    return [wrong for wrong in await asyncio.gather(*map(one, range(count))) if wrong is not None]


@pytest.mark.parametrize("settings", POLICIES, ids=lambda one: str(one.decode_policy))
@pytest.mark.slow  # hundreds of requests for each way to fail
async def test_an_engine_that_fails_at_once_is_ejected_before_the_budget_of_retries_is_spent(settings):
    """It has fewer requests than the others, so policies that look at the load send it more than its share."""
    with cluster(2, 2, settings) as running:
        running.engines["d0"].inject(SimulatedFault(FaultKind.STATUS, status=500))
        async with client_of(running) as client:
            wrong = await ask_many(client, 200)

        assert wrong == []
        assert len(running.engines["d0"].log) <= settings.circuit_breaker_failures + 16  # and what was under way


@pytest.mark.parametrize("sick", ["p0", "d0"])
async def test_an_engine_that_closes_each_connection_upon_a_request_is_ejected_when_no_idle_one_is_left(sick):
    """A closed idle connection is nobody's failure, and the router has as many of them as there were requests."""
    with cluster(2, 2, OPEN) as running:
        async with client_of(running) as client:
            await ask_many(client, 60)
            running.engines[sick].inject(SimulatedFault(FaultKind.DROP))
            served = len(running.engines[sick].log)
            wrong = await ask_many(client, 200)
            states = (await client.get("/instances", headers=KEY)).json()["instances"]

        assert wrong == []
        assert len(running.engines[sick].log) - served < 80
        role = "prefill" if sick == "p0" else "decode"
        assert {row["id"]: row["state"] for row in states}[f"{role}-0"] in ("ejected", "half_open")


@pytest.mark.parametrize("settings", POLICIES, ids=lambda one: str(one.decode_policy))
async def test_an_engine_that_has_recovered_gets_requests_again(settings):
    """Under every policy: after its trial it has its share."""
    settings = replace(settings, health_check_interval_s=0.0, ejection_time_s=0.2, circuit_breaker_failures=2)
    with cluster(2, 2, settings) as running:
        sick = running.engines["d0"]
        async with client_of(running) as client:
            sick.inject(SimulatedFault(FaultKind.STATUS, status=500))
            assert await ask_many(client, 40) == []
            sick.inject(None)
            before = len(sick.log)
            async with asyncio.timeout(50):  # the more trials have failed, the longer it rests
                while len(sick.log) == before:
                    assert await ask_many(client, 1) == []
                    await asyncio.sleep(0.05)
            states = await states_of(client)

        assert len(sick.log) == before + 1
        assert states["decode-0"] == "healthy"


async def test_ten_engines_join_drain_and_leave_while_100_streams_run():
    """What an upgrade of a whole fleet looks like: 0 failed requests, and nothing is sent to who has left."""
    new = {f"x{name}": sim for name, sim in sims(5, 5, token_s=0.5).items()}
    with cluster(1, 1, replace(OPEN, health_check_interval_s=5.0), token_s=0.5) as running, ExitStack() as stack:
        at = {name: stack.enter_context(serving(sim)) for name, sim in new.items()}
        stop = asyncio.Event()
        async with client_of(running) as client:
            results = []

            async def keep_asking(number):
                while not stop.is_set():
                    results.append(await stream(running.router, number))

            streams = [asyncio.create_task(keep_asking(number)) for number in range(100)]
            names = await asyncio.gather(*(add(client, name, at[name]) for name in new))
            await until_async(lambda: all(sim.log for sim in new.values()))
            await order(client, "drain", names)
            await drained(client, names)
            await order(client, "remove", names)
            left = {name: len(sim.log) for name, sim in new.items()}
            open_there = [entry for sim in new.values() for entry in sim.log if entry.state == "open"]
            await asyncio.sleep(0.3)
            stop.set()
            await asyncio.gather(*streams)

        assert [wrong for wrong in results if wrong is not None] == []
        assert len(results) >= 100
        assert open_there == []
        assert {name: len(sim.log) for name, sim in new.items()} == left
        assert [violation for sim in new.values() for violation in sim.violations] == []


async def states_of(client):
    rows = (await client.get("/instances", headers=KEY)).json()["instances"]
    return {row["id"]: row["state"] for row in rows}


async def add(client, name, address):
    role = "prefill" if "p" in name else "decode"
    response = await client.post("/instances/add", headers=KEY, json={"type": role, "instance": address})
    assert response.status_code == 200
    rows = (await client.get("/instances", headers=KEY)).json()["instances"]
    return next(row["id"] for row in rows if row["address"] == address)


async def order(client, verb, names):
    answers = await asyncio.gather(
        *(client.post(f"/instances/{verb}", headers=KEY, json={"id": name}) for name in names)
    )
    assert {answer.status_code for answer in answers} == {200}


async def drained(client, names):
    async with asyncio.timeout(25):
        while True:
            rows = (await client.get("/instances", headers=KEY)).json()["instances"]
            if all(row["state"] == "drained" for row in rows if row["id"] in names):
                return
            await asyncio.sleep(0.2)
