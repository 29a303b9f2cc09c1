"""Engines that can pull and push (``"mode": "auto"``): the router chooses for each pair, and the text is right."""

import asyncio
import json

import pytest

from pdrelay_proxy.settings import KvTransferMode, Settings
from pdrelay_tools.simulated.rules import expected_text
from support.sim import router, sims
from support.simulated_loop import in_simulated_time

KEY = {"X-Api-Key": "sesame"}
BODY = {"prompt": "once upon a time", "max_tokens": 4}
WAYS = ("pull", "push")


def settings(**changes):
    return Settings(admin_key="sesame", health_check_interval_s=0.02, **changes)


async def until_known(client):
    """Wait until the router has seen in the metrics of all engines that they take both."""
    async with asyncio.timeout(30):
        while True:
            found = (await client.get("/instances", headers=KEY)).json()["instances"]
            if all(one["mode"] == "auto" for one in found):
                return
            await asyncio.sleep(0.02)


async def ask(client, stream=True):
    """Complete a prompt, which must be right."""
    response = await client.post("/v1/completions", json=BODY | {"stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        text = response.json()["choices"][0]["text"]
    else:
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == expected_text(BODY)


def ways(engine):
    """Return how the KV of a decode engine's requests came."""
    return [params(entry).get("transfer_mode", "pull") for entry in engine.log]


def params(entry):
    return json.loads(entry.body)["kv_transfer_params"]


def violations(engines):
    return [violation for sim in engines.values() for violation in sim.violations]


@pytest.mark.parametrize("slow", WAYS)
def test_the_slower_way_of_a_pair_is_given_up(slow):
    """The right text all the time, each request by the way that the prefill engine was told, and pages that show it."""
    engines = sims(mode="auto", moves_s={slow: 0.2})

    async def scene():
        async with router(engines, settings(), asyncio.get_running_loop().time) as client:
            await until_known(client)
            for _ in range(24):
                await ask(client)
            (row,) = (await client.get("/pairs", headers=KEY)).json()["pairs"]
            return row

    _, row = in_simulated_time(scene())

    taken = ways(engines["d0"])
    (other,) = set(WAYS) - {slow}
    assert taken.count(slow) <= 8
    assert set(taken[-8:]) == {other}
    assert row["mode"] == other
    assert row[f"{slow}_s"] == pytest.approx(0.2)
    assert row[f"{other}_s"] < 0.001
    assert not violations(engines)


@pytest.mark.parametrize("fixed", WAYS)
async def test_the_operator_can_fix_the_way(fixed):
    """``--kv-transfer-mode``."""
    engines = sims(mode="auto", moves_s={fixed: 0.05})
    async with router(engines, settings(kv_transfer_mode=KvTransferMode(fixed))) as client:
        await until_known(client)
        for _ in range(10):
            await ask(client)

    assert set(ways(engines["d0"])) == {fixed}
    assert not violations(engines)


async def test_engines_of_one_way_are_not_asked_for_the_other():
    """Pull alone and push alone go on as before."""
    for mode in WAYS:
        engines = sims(mode=mode)
        async with router(engines, settings()) as client:
            for _ in range(4):
                await ask(client)
            (row,) = (await client.get("/pairs", headers=KEY)).json()["pairs"]

        assert row["mode"] is None
        assert all("transfer_mode" not in params(entry) for entry in engines["p0"].log)
        assert not violations(engines)
