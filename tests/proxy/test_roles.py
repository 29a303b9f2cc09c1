"""Roles in a whole router: a dry run over engines whose metrics a fleet of fluids writes."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from support.fluid_fleet import FluidFleet
from support.sim import router, until_async
from xpyd_proxy.errors import ConfigError
from xpyd_proxy.live import check
from xpyd_proxy.settings import RolesMode, Settings
from xpyd_proxy.testing.engine import Sim

DRY_RUN = Settings(
    roles=RolesMode.DRY_RUN, target_ttft_s=2.0, target_itl_s=0.05, roles_interval_s=0.01, health_check_interval_s=0.0
)


class ShownSim(Sim):
    """An engine that shows the metrics of one of a fleet."""

    def __init__(self, role, fleet, name):
        super().__init__(role)
        self._fleet, self._name, self.looks = fleet, name, 0
        self._app.router.routes.insert(0, Route("/metrics", self._shown))

    async def _shown(self, _):
        self.looks += 1
        return PlainTextResponse(self._fleet.exposition(self._name))


async def test_the_page_and_the_metrics_show_the_latest_decision():
    """What an operator reads before switching it on."""
    fleet = FluidFleet(4, 4)
    engines = {f"{role[0]}{name[1:]}": ShownSim(role.value, fleet, name) for name, role in fleet.roles.items()}
    async with router(engines, DRY_RUN, lambda: fleet.now) as client:

        async def stats():
            return (await client.get("/stats")).json()["roles"]

        for _ in range(9):
            fleet.step(4.2, 0.8)
            before = {name: engine.looks for name, engine in engines.items()}
            await until_async(lambda: all(each.looks > before[name] + 1 for name, each in engines.items()))  # noqa: B023
        found, metrics = await stats(), (await client.get("/metrics")).text

    assert (found["mode"], found["prefill"], found["decode"]) == ("dry-run", 4, 4)
    assert found["last_turn"] == "decode-0 to prefill, in a dry run"
    assert f'xpyd_wanted_engines{{role="prefill"}} {found["wanted_prefill"]}.0' in metrics
    assert 'xpyd_role_decisions_total{lacks="prefill",verdict="turn"} 1.0' in metrics


async def test_a_router_without_it_decides_nothing():
    """The default: no engine is asked for its metrics more often than before."""
    async with router({"p0": Sim("prefill"), "d0": Sim("decode")}, Settings()) as client:
        stats, metrics = (await client.get("/stats")).json(), (await client.get("/metrics")).text

    assert stats["roles"] is None
    assert "xpyd_wanted_engines{" not in metrics


@pytest.mark.parametrize("missing", ["target_ttft_s", "target_itl_s"])
def test_roles_without_a_target_are_refused(missing):
    """Nothing could be decided by: a router that did nothing would look like one that is content."""
    targets = {"target_ttft_s": 2.0, "target_itl_s": 0.05} | {missing: None}

    with pytest.raises(ConfigError, match="roles is dry-run, and what is wanted is not known"):
        check(Settings(roles=RolesMode.DRY_RUN, **targets))
