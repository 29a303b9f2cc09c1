"""Roles in a whole router, over engines whose metrics a fleet of fluids writes."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pdrelay_proxy.consistency import check
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.peers.settings import PeerSettings
from pdrelay_proxy.features.roles.settings import RoleSettings, RolesMode
from pdrelay_proxy.features.stores.settings import StoreSettings
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import Sim
from pdrelay_tools.simulated.rules import expected_text
from support.fluid_fleet import FluidFleet
from support.sim import router

pytestmark = pytest.mark.edges


WATCHES = RoleSettings(RolesMode.DRY_RUN, target_ttft_s=2.0, target_itl_s=0.05, roles_interval_s=0.01)
TURNS = replace(WATCHES, roles=RolesMode.AUTO)
DRY_RUN = Settings(health_check_interval_s=0.0).with_features(WATCHES)
AUTO = replace(DRY_RUN, admin_key="sesame").with_features(TURNS)
KEY = {"X-Api-Key": "sesame"}


class ShownSim(Sim):
    """An engine that shows the metrics of one of a fleet."""

    def __init__(self, role, fleet, name):
        super().__init__(role)
        self._fleet = fleet
        self._name = name
        self.looks = 0
        self._app.router.routes.insert(0, Route("/metrics", self._shown))

    async def _shown(self, _):
        self.looks += 1
        return PlainTextResponse(self._fleet.exposition(self._name) + b"vllm:pdrelay_leases_held 0\n")


async def roles_part(client):
    """Return what the status page shows of roles; None: nothing."""
    found = (await client.get("/stats")).json()["features"]
    return next((part for part in found if part["title"] == "Roles"), None)


def shown(fleet):
    """Engines that take legs of both kinds, by host."""
    return {f"{role[0]}{name[1:]}": ShownSim("both", fleet, name) for name, role in fleet.roles.items()}


async def looked(fleet, engines):
    """Wait until the router has looked at all of them, and decided; one that turns meanwhile needs time to pass."""
    before = {name: engine.looks for name, engine in engines.items()}
    async with asyncio.timeout(30):
        while not all(each.looks > before[name] + 1 for name, each in engines.items()):
            fleet.now += 0.001
            await asyncio.sleep(0.001)


async def roles_of(client):
    """Say which role each engine serves, by its name in the fleet; None: it turns."""
    rows = (await client.get("/instances", headers=KEY)).json()["instances"]
    return {f"e{row['address'][1:3]}": None if row["turns_to"] else Role(row["role"]) for row in rows}


async def passes(fleet, engines, client, busy, steps):
    """Let traffic come, until no engine turns; the roles are the fleet's from then on."""
    for _ in range(steps):
        fleet.step(*busy)
        await looked(fleet, engines)
        async with asyncio.timeout(20):
            while None in (found := await roles_of(client)).values():
                fleet.now += 0.02  # the router looks again at what an engine lends
                await asyncio.sleep(0.01)
        fleet.roles.update(found)


@asynccontextmanager
async def asking(client, count=4):
    """Ask all the time while the block lasts; yields what is not right, and what was asked."""
    over = asyncio.Event()
    wrong = []
    asked = []

    async def ask(number):
        while not over.is_set():
            body = {"prompt": f"client {number} asks {len(asked)}", "max_tokens": 4}
            asked.append(body)
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected_text(body):
                wrong.append(answer.text)
            await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(ask(number)) for number in range(count)]
    try:
        yield wrong, asked
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def test_the_page_and_the_metrics_show_the_latest_decision():
    """What an operator reads before switching it on."""
    fleet = FluidFleet(4, 4)
    engines = shown(fleet)
    async with router(engines, DRY_RUN, lambda: fleet.now) as client:
        for _ in range(9):
            fleet.step(4.2, 0.8)
            await looked(fleet, engines)
        found = await roles_part(client)
        metrics = (await client.get("/metrics")).text

    assert found["state"].startswith("dry-run, ")
    assert [row[:2] for row in found["rows"]] == [["prefill", "4"], ["decode", "4"]]
    assert "; the last one: decode-0 to prefill, in a dry run, " in found["sentences"][1]
    assert f'pdrelay_wanted_engines{{role="prefill"}} {found["rows"][0][3]}.0' in metrics
    assert 'pdrelay_role_decisions_total{lacks="prefill",verdict="turn"} 1.0' in metrics


async def test_engines_follow_the_traffic_and_no_request_is_lost():
    """There and back, while clients are served."""
    fleet = FluidFleet(4, 4)
    engines = shown(fleet)
    async with router(engines, AUTO, lambda: fleet.now) as client, asking(client) as (wrong, asked):
        await passes(fleet, engines, client, (4.0, 0.8), 25)
        prompts = [name for name, role in fleet.roles.items() if role is Role.PREFILL]
        await passes(fleet, engines, client, (0.9, 3.9), 30)
        answers = [name for name, role in fleet.roles.items() if role is Role.PREFILL]
        found = await roles_part(client)
        metrics = (await client.get("/metrics")).text

    assert wrong == []
    assert len(asked) > 50
    assert prompts == ["e00", "e01", "e02", "e03", "e04", "e05"]  # the first decode engines by their addresses
    assert len(answers) < 4
    mode, verdict, _ = found["state"].split(", ")
    assert mode == "auto"
    under_way = verdict == "turning"  # it counts, and is no prefill or decode engine more yet
    assert found["sentences"][1].startswith(
        f"{2 + len(prompts) - len(answers) + under_way} of 6 turns in the last hour"
    )
    assert 'pdrelay_turns_total{outcome="turned",to="prefill"} 2.0' in metrics


async def test_a_router_without_it_decides_nothing():
    """The default: no engine is asked for its metrics more often than before."""
    async with router({"p0": Sim("prefill"), "d0": Sim("decode")}, Settings()) as client:
        found = await roles_part(client)
        metrics = (await client.get("/metrics")).text

    assert found is None
    assert "pdrelay_wanted_engines" not in metrics


@pytest.mark.parametrize("missing", ["target_ttft_s", "target_itl_s"])
def test_roles_without_a_target_are_refused(missing):
    """Nothing could be decided by: a router that did nothing would look like one that is content."""
    targets = {"target_ttft_s": 2.0, "target_itl_s": 0.05} | {missing: None}

    with pytest.raises(ConfigError, match="roles is dry-run, and what is wanted is not known"):
        check(Settings().with_features(RoleSettings(RolesMode.DRY_RUN, **targets)))


def test_several_routers_without_a_shared_store_are_refused():
    """Each would turn engines by itself, and none would know of the others' turns."""
    settings = AUTO.with_features(PeerSettings(("router-2:8001",), peer_secret="s" * 32))

    with pytest.raises(ConfigError, match=r"several routers .peers. would decide at the same time"):
        check(settings)
    check(settings.with_features(StoreSettings("redis://h:6379/0")))
