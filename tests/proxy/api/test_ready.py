"""GET /ready says whether requests should be sent to this router, and GET /health whether it has engines."""

import pytest

from pdrelay_proxy.io.build import find_build
from pdrelay_proxy.settings import Settings
from support.sim import router, sims


@pytest.mark.parametrize(("x", "y", "alone", "served"), [(0, 1, True, 200), (0, 1, False, 503), (1, 0, True, 503)])
async def test_a_router_without_engines_stays_in_its_service(x, y, alone, served):
    """All routers lose their engines together: without routers clients get refused connections in place of a 503, and
    a load balancer needs its own time to take them back."""
    settings = Settings(decode_only_fallback=alone)
    async with router(sims(x, y), settings) as client:
        ready = await client.get("/ready")
        health = await client.get("/health")
        answer = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})

    assert (ready.status_code, health.status_code) == (200, 503)
    assert answer.status_code == served


@pytest.mark.parametrize(("y", "status"), [(1, 200), (0, 503)])
async def test_probes_say_what_runs_here_and_answers_to_clients_do_not(y, status):
    """Who looks after many routers asks each of them; clients need not know how old it is."""
    async with router(sims(1, y), Settings()) as client:
        health = await client.get("/health")
        answer = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        models = await client.get("/v1/models")

    assert (health.status_code, health.headers["x-pdrelay-version"]) == (status, str(find_build()))
    assert "x-pdrelay-version" not in {*answer.headers, *models.headers}
