"""Several routers in one process that tell each other over UDP how busy engines are."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from pdrelay_proxy.app import Router, build
from pdrelay_proxy.consistency import check
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.peers.feature import PeersFeature
from pdrelay_proxy.features.peers.peer_counts import PeerCounts
from pdrelay_proxy.features.peers.settings import PeerSettings
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.engine import Sim
from support.cluster import free_ports
from support.sim import InMemory, sims, until_async

pytestmark = pytest.mark.edges


SECRET = "the secret of these routers"
BODY = {"prompt": "once upon a time", "max_tokens": 2}


class Holding:
    """A pretended engine that keeps requests until it may answer."""

    def __init__(self, sim: Sim) -> None:
        self.sim, self.may_answer, self.arrived = sim, asyncio.Event(), 0
        self.is_gone = False

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_gone:
            raise httpx.ConnectError("refused", request=request)
        if request.method == "POST":
            self.arrived += 1
            await self.may_answer.wait()
        return await httpx.ASGITransport(self.sim).handle_async_request(request)


@dataclass
class Fleet:
    """Routers, their clients, and the prefill engines."""

    routers: list[Router]
    clients: list[httpx.AsyncClient]
    engines: list[Holding]
    counts: list[PeerCounts]

    def told(self, number):
        """Return how many requests of other routers a router knows of, by prefill engine."""
        members = self.routers[number].live.registry.members()
        return [member.load.at_other_routers for member in members if member.instance.role == "prefill"]

    async def all_know_of(self, requests, numbers):
        await until_async(lambda: all(sum(self.told(number)) == requests for number in numbers), seconds=30)

    def peers(self, ground):
        """Build the feature, and keep its counts."""
        feature = PeersFeature(ground)
        self.counts.append(feature.counts)
        return feature

    def heard(self, number):
        return self.counts[number].heard_routers


@asynccontextmanager
async def fleet(routers, prefill, *, policy=PolicyName.LEAST_LOADED, secrets=None, **more):
    """So many routers before the same engines."""
    ports = free_ports(routers)
    engines = sims(prefill, 1)
    holding = [Holding(engines[f"p{place}"]) for place in range(prefill)]
    network = InMemory({f"p{place}": one for place, one in enumerate(holding)} | {"d0": engines["d0"]})
    async with AsyncExitStack() as stack:
        found = Fleet([], [], holding, [])
        for number, port in enumerate(ports):
            settings = Settings(
                prefill=tuple(f"p{place}:80" for place in range(prefill)),
                decode=("d0:80",),
                allowed_hosts=("*",),
                prefill_policy=policy,
                decode_policy=PolicyName.LEAST_LOADED,
                **more,
            )
            secret = SECRET if secrets is None else secrets[number]
            settings = settings.with_features(PeerSettings(tuple(f"127.0.0.1:{each}" for each in ports), port, secret))
            router = build(settings, fabric=network.fabric, make_features=[found.peers])
            await stack.enter_async_context(network.running(router.app))
            transport = httpx.ASGITransport(router.app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=30)
            found.routers.append(router)
            found.clients.append(await stack.enter_async_context(client))
        try:
            yield found
        finally:
            for one in holding:
                one.may_answer.set()


async def test_a_router_sends_nothing_to_an_engine_that_another_one_has_filled():
    """Three routers, one request each: alone each would think all engines idle."""
    async with fleet(3, 3) as found:
        await until_async(lambda: all(found.heard(number) == 2 for number in range(3)), seconds=30)
        asked = []
        for number in range(3):
            asked.append(asyncio.create_task(found.clients[number].post("/v1/completions", json=BODY)))
            await until_async(lambda: sum(one.arrived for one in found.engines) == len(asked), seconds=30)
            await found.all_know_of(len(asked), range(number + 1, 3))

        assert [one.arrived for one in found.engines] == [1, 1, 1]
        for one in found.engines:
            one.may_answer.set()
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        await until_async(lambda: not any(sum(found.told(number)) for number in range(3)), seconds=30)
        metrics = (await found.clients[0].get("/metrics")).text
        assert 'pdrelay_peers{state="heard"} 2.0' in metrics
        for result in ("tag", "send_failed"):
            assert f'pdrelay_peer_datagrams_total{{result="{result}"}} 0.0' in metrics


def key(name):
    return {"Authorization": f"Bearer {name}-key-of-16-chars"}


def admits(admission, name):
    """Tell whether a key has tokens left."""
    account = admission._accounts.get(name)
    quota = admission.limits.max_key_tokens_per_minute
    return account is None or not account.quota.wait(quota, now=time.monotonic())


async def test_a_router_with_another_secret_is_not_heard_and_is_counted():
    """Its requests would make engines look busy."""
    async with fleet(2, 2, secrets=[SECRET, "the secret of other routers"]) as found:
        await until_async(lambda: found.counts[0].datagrams["tag"] > 0, seconds=30)

        assert found.heard(0) == 0
        assert found.told(0) == [0, 0]


async def test_engines_are_not_asked_for_reports_of_their_load():
    """They would be added to what the routers tell, and vLLM logs a line for each."""
    async with fleet(1, 1) as found:
        found.engines[0].may_answer.set()
        await found.clients[0].post("/v1/completions", json=BODY)

        assert "endpoint-load-metrics-format" not in found.engines[0].sim.log[-1].headers


async def test_a_quota_that_one_router_has_served_is_used_up_at_the_other(tmp_path):
    """A client gets its tokens once, and not from each router."""
    (tmp_path / "keys").write_text("a:a-key-of-16-chars\nb:b-key-of-16-chars\n")
    limits = {"api_keys_file": str(tmp_path / "keys"), "max_key_tokens_per_minute": 50}
    async with fleet(2, 1, **limits) as found:
        found.engines[0].may_answer.set()
        await until_async(lambda: all(found.heard(number) == 1 for number in range(2)), seconds=30)
        gates = [one.requests.services.gate for one in found.routers]
        await until_async(lambda: all(gate.admission.share == 1.0 for gate in gates), seconds=30)
        body = {"prompt": "x", "max_tokens": 40}
        sent = [await found.clients[0].post("/v1/completions", json=body, headers=key("a")) for _ in range(2)]
        accounts = found.routers[1].requests.services.gate.admission
        await until_async(lambda: not admits(accounts, "a"), seconds=30)
        refused = await found.clients[1].post("/v1/completions", json=body, headers=key("a"))
        other = await found.clients[1].post("/v1/completions", json=body, headers=key("b"))

    assert [answer.status_code for answer in sent] == [200, 200]
    assert (refused.status_code, other.status_code) == (429, 200)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings().with_features(PeerSettings(("router:8001",))), "PDRELAY_PEER_SECRET"),
        (Settings().with_features(PeerSettings(("router:8001",), peer_secret="short")), "PDRELAY_PEER_SECRET"),
        (
            Settings(workers=2, admin_port=9000).with_features(PeerSettings(("router:8001",), peer_secret=SECRET)),
            "peers needs workers 1, not 2: run more routers in place of workers",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    """At the start, in one sentence."""
    with pytest.raises(ConfigError, match=said):
        check(settings)


async def test_an_engine_that_others_watch_is_found_gone_and_back_by_their_word():
    """Six routers, of which three look at an engine often; each of the others would do so in a minute."""
    async with fleet(6, 1, health_check_interval_s=1.0) as found:
        registries = [router.live.registry for router in found.routers]
        await until_async(lambda: all(found.heard(number) == 5 for number in range(6)), seconds=30)
        lives = [registry.known(Role.PREFILL)[0] for registry in registries]
        lives = [registry.member(one.id).life for registry, one in zip(registries, lives, strict=True)]
        await until_async(lambda: all(life.state is HealthState.HEALTHY for life in lives), seconds=30)

        found.engines[0].is_gone = True
        await until_async(lambda: all(life.state is HealthState.EJECTED for life in lives), seconds=30)
        found.engines[0].is_gone = False
        await until_async(lambda: all(life.state is HealthState.HEALTHY for life in lives), seconds=30)
