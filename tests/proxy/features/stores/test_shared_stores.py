"""Three router processes and one store: what an operator tells one of them, all of them know."""

import asyncio
import time
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest

from pdrelay_tools.simulated.engine import Sim
from pdrelay_tools.simulated.rules import expected_text
from support.kube_api import KubeApi
from support.redis_server import RedisServer
from support.router_process import KEY, router_processes, rows_of
from support.service_account import ServiceAccount
from support.sim import serving, serving_at

pytestmark = pytest.mark.processes


BODY = {"prompt": "once upon a time", "max_tokens": 4}
ENGINES = 60


class File:
    """A store that has no outage of its own."""

    def __init__(self, folder):
        self.url = f"file:{folder / 'set.json'}"

    @property
    def env(self):
        return {}

    async def start(self):
        pass

    async def stop(self):
        pass


class Redis(File):
    """A Redis without persistence: after an outage it has forgotten everything."""

    def __init__(self, folder):
        self._server = RedisServer(folder)
        self.url = self._server.url

    async def start(self):
        self._server.start()

    async def stop(self):
        self._server.stop()


class ConfigMap(File):
    """A ConfigMap in the fake API, which wants a token and shows a certificate."""

    url = "kubernetes:pdrelay-instances"

    def __init__(self, folder):
        (folder / "account").mkdir()
        account = ServiceAccount(folder / "account")
        self.api = KubeApi(token="first", tls=account.tls)
        self._account = account
        self._port = 0

    async def start(self):
        await self.api.start(self._port)
        if not self._port:
            self.api.put("configmaps", "pdrelay-instances", {"metadata": {}})
        self._port = self.api.port

    async def stop(self):
        await self.api.stop()

    @property
    def env(self):
        return self._account.env(self.api)


@asynccontextmanager
async def routers(kind, folder, count=3, *more):
    """A store, routers that share it, and a client."""
    store = kind(folder)
    await store.start()
    try:
        with ExitStack() as stack:
            args = ("--store", store.url, *(more or ("--health-check-interval", "0")))
            started = router_processes(folder, count, *args, env=store.env)
            found = await asyncio.to_thread(stack.enter_context, started)
            limits = httpx.Limits(max_connections=30, max_keepalive_connections=0)
            async with httpx.AsyncClient(timeout=20, trust_env=False, limits=limits) as client:
                yield store, found, client
    finally:
        await store.stop()


async def views(client, found):
    """Return which engines each router has."""
    rows = await asyncio.gather(*(rows_of(client, router.url) for router in found))
    return [{(row["role"], row["address"], row["source"]) for row in some} for some in rows]


async def equal_after(client, found, wanted, *, seconds):
    """Wait until all routers have these engines; return how long it took, without the last look itself."""
    began = time.monotonic()
    want = {("decode", address, "store") for address in wanted}
    while True:
        took = time.monotonic() - began
        seen = [view for view in await views(client, found) if view != want]
        if not seen:
            return took
        assert took < seconds, [(sorted(want - view), sorted(view - want)) for view in seen]
        await asyncio.sleep(0.02)


async def order(client, router, verb, address):
    body = {"type": "decode", "instance": address}
    return (await client.post(f"{router.url}/instances/{verb}", headers=KEY, json=body)).status_code


@pytest.mark.slow  # 90 changes through three routers, on each kind of store
@pytest.mark.parametrize("kind", [File, ConfigMap, Redis])
async def test_of_90_adds_and_removes_at_the_same_time_all_are_kept(kind, tmp_path, capsys):
    """60 engines are added through three routers and 30 of them removed again through others."""
    with serving_at(ENGINES, Sim("decode")) as addresses:
        async with routers(kind, tmp_path) as (_, found, client):

            async def work(number, address):
                answers = [await order(client, found[number % 3], "add", address)]
                if number % 2:
                    other = found[(number + 1) % 3]
                    answers.append(await _removed(client, other, address))
                return answers

            answers = await asyncio.gather(*(work(number, address) for number, address in enumerate(addresses)))
            took = await equal_after(client, found, addresses[::2], seconds=20.0)
            for router in found:  # a busy machine may have held up one of them: within a second all hear of a change
                if took < 1.0:
                    break
                assert await order(client, router, "remove", addresses[0]) == 200
                assert await order(client, router, "add", addresses[0]) == 200
                took = await equal_after(client, found, addresses[::2], seconds=20.0)

    assert took < 1.0
    flat = [answer for some in answers for answer in some]
    assert (len(flat), set(flat)) == (90, {200})
    with capsys.disabled():
        print(f" {kind.__name__}: equal after {took * 1000:.0f} ms", end="")


async def _removed(client, router, address):
    """Remove it through a router that hears of it in a moment."""
    deadline = time.monotonic() + 20.0
    while (code := await order(client, router, "remove", address)) == 404 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return code


@pytest.mark.slow  # the outage lasts some seconds
@pytest.mark.parametrize("kind", [ConfigMap, Redis])
async def test_an_outage_of_the_store_stops_no_request_and_loses_no_engine(kind, tmp_path):
    """The last view serves; what cannot be kept is refused with 503; afterwards all routers agree again."""
    with (
        serving_at(3, Sim("decode")) as addresses,
        serving(Sim("prefill")) as prefill,
    ):
        async with routers(kind, tmp_path) as (store, found, client):
            body = {"type": "prefill", "instance": prefill}
            assert (await client.post(f"{found[0].url}/instances/add", headers=KEY, json=body)).status_code == 200
            assert await order(client, found[1], "add", addresses[0]) == 200
            await _both(client, found, {prefill, addresses[0]})

            await store.stop()
            assert await order(client, found[0], "add", addresses[1]) == 503
            await asyncio.sleep(1.0)
            for router in found:
                answer = await client.post(f"{router.url}/v1/completions", json=BODY)
                assert answer.json()["choices"][0]["text"] == expected_text(BODY)
            await _both(client, found, {prefill, addresses[0]})

            await store.start()
            async with asyncio.timeout(40):
                while await order(client, found[2], "add", addresses[2]) not in (200, 400):
                    await asyncio.sleep(0.1)
            await _both(client, found, {prefill, addresses[0], addresses[2]}, seconds=40)


async def _both(client, found, wanted, *, seconds=20.0):
    deadline = time.monotonic() + seconds
    while seen := [view for view in await views(client, found) if {address for _, address, _ in view} != wanted]:
        assert time.monotonic() < deadline, (wanted, seen)
        await asyncio.sleep(0.02)
