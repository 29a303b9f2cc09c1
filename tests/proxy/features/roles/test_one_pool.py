"""One pool of pods that serve both roles: routers with ``--roles auto`` give each of them one, while clients ask."""

import asyncio
from collections import Counter
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest

from pdrelay_tools.simulated.engine import Sim
from pdrelay_tools.simulated.rules import expected_text
from support.kube_api import KubeApi, pod
from support.router_process import router_processes, rows_of
from support.service_account import ServiceAccount
from support.sim import serving

pytestmark = pytest.mark.processes


ARGS = (
    *("--kubernetes-selector", "app=pdrelay", "--health-check-interval", "0.5"),
    *("--roles", "auto", "--target-ttft", "2", "--target-itl", "0.05", "--roles-interval", "0.1"),
)


class Pods:
    """Simulated engines, each of which is a pod with the label of both roles."""

    def __init__(self, api):
        self._api, self._stack, self.sims = api, ExitStack(), {}

    async def add(self, name):
        sim = self.sims[name] = Sim("both", prefill_s=0.005, token_s=0.002)
        host, port = (await asyncio.to_thread(self._stack.enter_context, serving(sim))).split(":")
        self._api.put("pods", name, pod(host, "both", annotations={"pdrelay/port": port}))

    def close(self):
        self._stack.close()


@asynccontextmanager
async def asking(client, urls):
    """Ask all routers all the time while the block lasts; yields what is not right, and what was asked."""
    over = asyncio.Event()
    wrong = []
    asked = []

    async def ask(url):
        while not over.is_set():
            body = {"prompt": f"question {len(asked)}", "max_tokens": 4}
            asked.append(body)
            answer = await client.post(f"{url}/v1/completions", json=body)
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected_text(body):
                wrong.append(answer.text)

    tasks = [asyncio.create_task(ask(url)) for url in urls]
    try:
        yield wrong, asked
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def roles(client, url):
    """Return how many engines are prefill and how many are decode; None: one serves both still, or turns."""
    rows = await rows_of(client, url)
    found = Counter(row["role"] for row in rows if not row["turns_to"])
    return None if found["both"] or found.total() < len(rows) else (found["prefill"], found["decode"])


async def until_given(client, urls, engines):
    """Wait until all routers agree on the roles of so many engines; return how many are prefill, and decode.

    An engine that misses a probe on a busy machine does not count as one of its role at that moment.
    """
    end = asyncio.get_running_loop().time() + 60
    while True:
        found = [await roles(client, url) for url in urls]
        if found[0] is not None and sum(found[0]) == engines and found == found[:1] * len(urls):
            return found[0]
        assert asyncio.get_running_loop().time() < end, found
        await asyncio.sleep(0.05)


async def test_pods_of_one_pool_get_their_roles_and_no_request_is_lost(tmp_path):
    """They serve at once, both roles at first; one that comes later gets the role that has fewer, at all routers."""
    (tmp_path / "account").mkdir()
    account = ServiceAccount(tmp_path / "account")
    async with KubeApi(token="first", tls=account.tls) as api:
        pods = Pods(api)
        try:
            for number in range(5):
                await pods.add(f"engine-{number}")
            args = (*ARGS, "--store", f"file:{tmp_path / 'set.json'}")
            with ExitStack() as stack:
                started = router_processes(tmp_path, 2, *args, env=account.env(api))
                routers = await asyncio.to_thread(stack.enter_context, started)
                urls = [router.url for router in routers]
                async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
                    for url in urls:
                        async with asyncio.timeout(20):
                            while (await client.get(f"{url}/ready")).status_code != 200:
                                await asyncio.sleep(0.05)
                    async with asking(client, urls) as (wrong, asked):
                        five = await until_given(client, urls, 5)
                        await pods.add("engine-5")
                        six = await until_given(client, urls, 6)
                    stats = [(await client.get(f"{url}/stats")).json() for url in urls]
                said = "".join(router.said for router in routers)
        finally:
            await asyncio.to_thread(pods.close)

    assert five in ((2, 3), (3, 2))
    assert six in ((2, 4), (3, 3), (4, 2))
    assert wrong == []
    assert len(asked) > 20
    assert [violation for sim in pods.sims.values() for violation in sim.violations] == []
    assert said.count("verdict=assign") == 6  # by the router that has the lease
    parts = [part for each in stats for part in each["features"] if part["title"] == "Roles"]
    assert [part["sentences"][1].partition(" turns")[0] for part in parts] == ["0 of 6"] * 2
