"""A rolling update of engines and of a router, while clients ask: real router processes, simulated engines."""

import asyncio
import itertools
import re
from contextlib import ExitStack

import httpx
import pytest

from pdrelay_tools.simulated.engine import Sim
from pdrelay_tools.simulated.rules import expected_text
from support.kube_api import KubeApi, pod
from support.router_process import router_processes, rows_of
from support.service_account import ServiceAccount
from support.sim import serving

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # eight pods come and go one after the other
ARGS = (
    *("--kubernetes-selector", "app=pdrelay", "--health-check-interval", "0.5"),
    *("--drain-grace", "5", "--shutdown-timeout", "10"),  # the Service of a busy machine notices late
)
CLIENTS = 12


class Pool:
    """What controllers and the kubelet do: pods come, get ready, are deleted, end their requests, and are gone."""

    def __init__(self, api):
        self._api = api
        self._numbers = itertools.count()
        self.sims = {}
        self.late = []  # pods that got something new after all routers had let go of them
        self.left_by_all = None  # wait until they have; an engine's address
        self._stacks = {}

    async def start(self, role, revision):
        """Start a pod; return its name once it is ready."""
        name, sim, stack = f"{role}-{next(self._numbers)}", Sim(role, prefill_s=0.01, token_s=0.01), ExitStack()
        address = await asyncio.to_thread(stack.enter_context, serving(sim))
        self.sims[name], self._stacks[name] = sim, stack
        self._put(name, address, role, revision, ready=False)
        await asyncio.sleep(0.2)
        self._put(name, address, role, revision)
        return name, address, role, revision

    async def end(self, name, address, role, revision):
        """Delete a pod: it is marked, its preStop hook waits, and it ends with what it still has.

        The hook's wait ends with what it is for: on a busy machine that takes longer than half a second.
        """
        self._put(name, address, role, revision, deleted=True)
        await self.left_by_all(address)
        before = len(self.sims[name].log)
        await asyncio.sleep(0.5)
        self.late += [name] * (len(self.sims[name].log) > before)
        self._api.delete("pods", name)
        await asyncio.to_thread(self._stacks.pop(name).close)

    def close(self):
        for stack in self._stacks.values():
            stack.close()

    def _put(self, name, address, role, revision, **said):
        host, port = address.split(":")
        self._api.put("pods", name, pod(host, role, annotations={"pdrelay/port": port}, revision=revision, **said))


class Clients:
    """They ask without a pause, through any router that says that it is ready; what goes wrong is kept."""

    def __init__(self, client, routers):
        self._client = client
        self.ready = list(routers)  # what the Service has in it
        self.asked = 0
        self.wrong = []
        self.pairs = set()
        self.revisions = {}  # router, instance -> revision
        self._stop = asyncio.Event()

    async def ask(self, number):
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            url = self.ready[turn % len(self.ready)]
            body = {"prompt": f"question {number} {turn}", "max_tokens": 3}
            self.asked += 1
            try:
                response = await self._client.post(f"{url}/v1/completions", json=body)
            except httpx.HTTPError as exc:
                self.wrong.append(repr(exc))
                continue
            if response.status_code != 200 or response.json()["choices"][0]["text"] != expected_text(body):
                self.wrong.append((response.status_code, response.text, response.headers.get("server-timing")))
                continue
            self.pairs.add((url, *re.findall(r'(?:prefill|decode);desc="([^"]+)"', response.headers["server-timing"])))

    async def watch(self):
        """Read who is who: an instance's id is never used again."""
        while not self._stop.is_set():
            for url in tuple(self.ready):
                for row in await rows_of(self._client, url):
                    self.revisions[url, row["id"]] = row["revision"]
            await asyncio.sleep(0.05)

    async def left_by_all(self, address):
        """Wait until no router that is ready sends anything new to an engine, or has anything at it.

        A leg whose engine was chosen before the pod was marked may be sent after that.
        """
        async with asyncio.timeout(30):
            for url in tuple(self.ready):
                while any(
                    row["address"] == address and (row["state"] not in ("draining", "drained") or row["in_flight"])
                    for row in await rows_of(self._client, url)
                ):
                    await asyncio.sleep(0.02)

    def stop(self):
        self._stop.set()


async def test_two_revisions_a_router_that_ends_and_no_failed_request(tmp_path, capsys):
    """The pools go from one revision to the next, one pod after the other, and one of two routers gets SIGTERM."""
    (tmp_path / "account").mkdir()
    account = ServiceAccount(tmp_path / "account")
    async with KubeApi(token="first", tls=account.tls) as api:
        pool = Pool(api)
        try:
            old = [await pool.start(role, "v1") for role in ("prefill", "decode") * 2]
            with ExitStack() as stack:
                started = router_processes(tmp_path, 2, *ARGS, env=account.env(api))
                routers = await asyncio.to_thread(stack.enter_context, started)
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
                async with httpx.AsyncClient(timeout=20, trust_env=False, limits=limits) as client:
                    clients = Clients(client, [router.url for router in routers])
                    pool.left_by_all = clients.left_by_all
                    for router in routers:
                        await _ready(client, router.url)
                    tasks = [asyncio.create_task(clients.ask(number)) for number in range(CLIENTS)]
                    tasks.append(asyncio.create_task(clients.watch()))
                    await asyncio.sleep(0.5)

                    for one in old:  # surge by one, as a Deployment does
                        await pool.start(one[2], "v2")
                        await asyncio.sleep(0.2)
                        await pool.end(*one)

                    routers[0].terminate()
                    async with asyncio.timeout(30):
                        while (await client.get(f"{routers[0].url}/ready")).status_code == 200:
                            await asyncio.sleep(0.02)
                    clients.ready.remove(routers[0].url)  # the Service notices within the grace
                    code = await asyncio.to_thread(routers[0].child.wait, 20)

                    await asyncio.sleep(0.5)
                    clients.stop()
                    await asyncio.gather(*tasks)
        finally:
            await asyncio.to_thread(pool.close)

    with capsys.disabled():
        print(f" {clients.asked} requests, {len(clients.pairs)} pairs", end="")
    assert clients.wrong == []
    assert code == 0
    assert clients.asked > 100
    met = {tuple(clients.revisions[url, name] for name in names) for url, *names in clients.pairs if len(names) == 2}
    assert met == {("v1", "v1"), ("v2", "v2")}
    assert pool.late == []
    assert [violation for sim in pool.sims.values() for violation in sim.violations] == []


async def _ready(client, url):
    async with asyncio.timeout(20):
        while (await client.get(f"{url}/ready")).status_code != 200:
            await asyncio.sleep(0.05)
