"""Routers that find their engines in Kubernetes, and share what operators add: real sockets, a fake API."""

import asyncio
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.features.pods.settings import PodSettings
from pdrelay_proxy.features.stores.settings import StoreSettings
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.rules import expected_text
from support.kube_api import KubeApi, pod
from support.router_process import KEY, rows_of
from support.service_account import ServiceAccount
from support.sim import serving, sims

pytestmark = pytest.mark.processes


BODY = {"prompt": "once upon a time", "max_tokens": 4}
OPEN = Settings(admin_key=KEY["X-Api-Key"], health_check_interval_s=0.2).with_features(PodSettings("app=pdrelay"))


def engine_pod(address, role, **said):
    """A pod whose engine is a simulated one on this machine."""
    host, port = address.split(":")
    return pod(host, role, annotations={"pdrelay/port": port}, **said)


@pytest.fixture
def account(tmp_path):
    folder = tmp_path / "account"
    folder.mkdir()
    return ServiceAccount(folder)


@asynccontextmanager
async def cluster(account, monkeypatch, settings=OPEN, x=1, y=1):
    """A fake API with x + y pods, and a router that looks for them."""
    with ExitStack() as stack:
        async with KubeApi(token="first", tls=account.tls) as api:
            for name, value in account.env(api).items():
                monkeypatch.setenv(name, value)
            engines = sims(x, y)
            at = {name: stack.enter_context(serving(engine)) for name, engine in engines.items()}
            for name, address in at.items():
                api.put("pods", name, engine_pod(address, engines[name].role, revision="v1"))
            url = "http://" + await asyncio.to_thread(stack.enter_context, serving(build(settings).app))
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, limits=limits) as client:
                yield api, engines, at, client
            await asyncio.to_thread(stack.close)


async def until_rows(client, true, *, seconds=30):
    async with asyncio.timeout(seconds):
        while not true(rows := await rows_of(client, "")):
            await asyncio.sleep(0.02)
    return rows


async def ask(client):
    response = await client.post("/v1/completions", json=BODY)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == expected_text(BODY)
    return response.headers["server-timing"]


async def test_engines_are_found_used_and_left(account, monkeypatch):
    """From the pods alone; and every instance says where it comes from."""
    async with cluster(account, monkeypatch, x=1, y=2) as (api, engines, at, client):
        rows = await until_rows(client, lambda rows: len(rows) == 3)
        assert {(row["source"], row["revision"], row["address"]) for row in rows} == {
            ("pods", "v1", address) for address in at.values()
        }
        assert {row["generation"] for row in rows} == {1}
        assert (await client.get("/ready")).status_code == 200
        await ask(client)

        api.put("pods", "d0", engine_pod(at["d0"], "decode", revision="v1", deleted=True))
        await until_rows(client, lambda rows: any(row["state"] in ("draining", "drained") for row in rows))
        before = len(engines["d0"].log)
        for _ in range(6):
            assert "decode" in await ask(client)
        assert len(engines["d0"].log) == before

        api.delete("pods", "d0")
        rows = await until_rows(client, lambda rows: len(rows) == 2)
        assert at["d0"] not in {row["address"] for row in rows}


async def test_readiness_waits_for_the_first_view(account, monkeypatch):
    """A router that has not read the pods yet would answer 503 to everybody."""
    async with cluster(account, monkeypatch) as (api, _, _, client):
        await until_rows(client, lambda rows: len(rows) == 2)
        api.faults.slow_list_s = 60.0
        url, stop = await asyncio.to_thread(_another)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as second:
                response = await second.get("/ready")
                assert response.status_code == 503
                assert "pods is silent" in response.text
                api.faults.slow_list_s = 0.0
                async with asyncio.timeout(30):
                    while (await second.get("/ready")).status_code != 200:
                        await asyncio.sleep(0.05)
        finally:
            await asyncio.to_thread(stop)


def _another():
    stack = ExitStack()
    return "http://" + stack.enter_context(serving(build(OPEN).app)), stack.close


async def test_a_pod_is_not_removed_by_hand_and_what_was_added_by_hand_is(account, monkeypatch):
    """A pod would be back at once: the router says so instead of pretending."""
    async with cluster(account, monkeypatch) as (_, _, _, client):
        rows = await until_rows(client, lambda rows: len(rows) == 2)
        refused = await client.post("/instances/remove", headers=KEY, json={"id": rows[0]["id"]})
        assert (refused.status_code, "delete the pod" in refused.text) == (409, True)

        with serving(sims(0, 1)["d0"]) as address:
            wanted = {"type": "decode", "instance": address}
            assert (await client.post("/instances/add", headers=KEY, json=wanted)).status_code == 200
            rows = await rows_of(client, "")
            assert [row["source"] for row in rows] == ["pods", "pods", "store"]
            again = await client.post("/instances/add", headers=KEY, json=wanted)
            assert (again.status_code, again.json()) == (400, {"detail": "Instance already exists."})
            await client.post("/instances/drain", headers=KEY, json=wanted)
            await until_rows(client, lambda rows: rows[-1]["state"] == "drained")
            await client.post("/instances/undrain", headers=KEY, json=wanted)
            await until_rows(client, lambda rows: rows[-1]["state"] == "healthy")
            assert (await client.post("/instances/remove", headers=KEY, json=wanted)).status_code == 200
            assert len(await rows_of(client, "")) == 2


async def test_the_last_view_serves_while_the_api_is_away_and_its_age_is_shown(account, monkeypatch):
    """An API server that restarts stops no request; an alert can see that the view grows old."""
    async with cluster(account, monkeypatch) as (api, _, at, client):
        await until_rows(client, lambda rows: len(rows) == 2)
        port = api.port
        await api.stop()
        await asyncio.sleep(1.2)
        await ask(client)
        numbers = (await client.get("/metrics")).text
        assert 'pdrelay_discovery_synced{source="pods"} 1.0' in numbers
        assert _number(numbers, 'pdrelay_discovery_age_seconds{source="pods"}') > 1
        assert _number(numbers, 'pdrelay_discovery_age_seconds{source="store"}') < 5
        assert _number(numbers, 'pdrelay_discovery_engines{source="pods"}') == 2

        api.delete("pods", "d0")
        await api.start(port)
        await until_rows(client, lambda rows: [row["address"] for row in rows] == [at["p0"]], seconds=20)


def _number(text, name):
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


async def test_the_router_asks_the_api_for_nothing_but_what_its_role_grants(account, monkeypatch):
    """The closure of its RBAC: these calls and no others, in its own namespace."""
    settings = OPEN.with_features(StoreSettings("kubernetes:pdrelay-instances"))
    async with cluster(account, monkeypatch, settings) as (api, _, _, client):
        api.put("configmaps", "pdrelay-instances", {"metadata": {}})
        await until_rows(client, lambda rows: len(rows) == 2)
        with serving(sims(0, 1)["d0"]) as address:
            wanted = {"type": "decode", "instance": address}
            async with asyncio.timeout(20):
                while (await client.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
            for path in ("add", "drain", "undrain", "remove"):
                response = await client.post(f"/instances/{path}", headers=KEY, json=wanted)
                assert response.status_code == 200, response.text

        assert {(call.verb, call.resource, call.name) for call in api.calls} == {
            ("list", "pods", ""),
            ("watch", "pods", ""),
            ("list", "configmaps", "pdrelay-instances"),
            ("watch", "configmaps", "pdrelay-instances"),
            ("patch", "configmaps", "pdrelay-instances"),
        }
        assert {call.namespace for call in api.calls} == {"default"}


async def test_pods_and_store_may_be_in_other_namespaces(account, monkeypatch):
    """Each names its own; neither has to be the router's."""
    pods = PodSettings("app=pdrelay", kubernetes_namespace="engines")
    settings = OPEN.with_features(pods, StoreSettings("kubernetes:fleet/pdrelay-instances"))
    async with cluster(account, monkeypatch, settings, x=0, y=0) as (api, _, _, client):
        api.put("configmaps", "pdrelay-instances", {"metadata": {}}, "fleet")
        async with asyncio.timeout(20):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)

        assert {(call.resource, call.namespace) for call in api.calls} == {("pods", "engines"), ("configmaps", "fleet")}
