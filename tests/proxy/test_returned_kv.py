"""How many prefill legs name a decode engine that has KV of earlier turns."""

import httpx

from pdrelay_proxy.app import build
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import Api, Role
from pdrelay_proxy.settings import PolicyName, Settings
from support.sim import InMemory, sims

LONG = "a long first question with a document in it, " * 20
COUNTER = "pdrelay_return_kv_legs_total"


async def counted(turns, *, knows_id=True, **settings):
    """Have so many turns of a chat; return the lines of the metrics that count them."""
    network = InMemory(sims())
    given = {"decode_policy": PolicyName.PREFIX, "health_check_interval_s": 0.0, "allowed_hosts": ("*",)} | settings
    router = build(Settings(prefill=("p0:80",), decode=("d0:80",), **given), fabric=network.fabric)
    if knows_id:  # as a health check reads it from the engine's metrics
        for instance in router.live.registry.known(Role.DECODE):
            router.live.registry.learn(instance.id, EngineCapabilities(engine_id="d0"))
    transport = httpx.ASGITransport(router.app)
    async with network.running(router.app), httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        messages = []
        for number in range(turns):
            messages.append({"role": "user", "content": f"{number} {LONG}"})
            answer = await client.post(Api.CHAT, json={"model": "sim", "messages": messages, "max_tokens": 4})
            messages.append(answer.json()["choices"][0]["message"])
        lines = (await client.get("/metrics")).text.splitlines()
    return {line for line in lines if line.startswith(COUNTER)}


async def test_each_prefill_leg_is_counted_by_whether_it_names_an_engine():
    """The first turn of a chat has nothing behind it; engines that never are named waste the setting."""
    assert await counted(3, return_kv=True) == {
        COUNTER + '{result="named"} 2.0',
        COUNTER + '{result="unknown"} 1.0',
    }
    assert await counted(2, return_kv=True, knows_id=False) == {COUNTER + '{result="unknown"} 2.0'}


async def test_nothing_is_counted_without_the_setting():
    """The series would say that engines could have been named."""
    assert await counted(2) == set()
