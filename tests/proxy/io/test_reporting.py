"""Prefill engines say how busy they are."""

import httpx

from support.sim import sims
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Answer, Instance, InstanceId, Leg, Role
from xpyd_proxy.io.engines import HttpEngines
from xpyd_proxy.io.reporting import Reporting
from xpyd_proxy.settings import Settings

P = Instance(InstanceId("prefill-0"), Role.PREFILL, Address("http", "p", 80))
REPORT = 'JSON {"named_metrics": {"num_requests_waiting": 2.0}}'


async def test_a_prefill_leg_asks_for_a_report_and_passes_it_on():
    """In vLLM's own headers; the answer stays what it is."""
    seen, reports = [], []

    async def handle(request):
        seen.append(request.headers)
        return httpx.Response(200, json={}, headers={"endpoint-load-metrics": REPORT})

    async with HttpEngines(Settings(), transport=httpx.MockTransport(handle)) as engines:
        asked = Reporting(engines, lambda *report: reports.append(report))
        answer = await asked.ask(Leg(P, "/v1/completions", b"{}", ((b"x-request-id", b"r"),)), timeout_s=5)

    assert seen[0]["endpoint-load-metrics-format"] == "JSON"
    assert seen[0]["x-request-id"] == "r"
    assert reports == [(P, REPORT.encode())]
    assert answer == Answer(200, "application/json", b"{}", REPORT.encode())


async def test_an_engine_that_says_nothing_is_not_heard():
    """Older versions know nothing of it."""
    reports = []
    transport = httpx.ASGITransport(sims()["p0"])
    async with HttpEngines(Settings(), transport=transport) as engines:
        asked = Reporting(engines, lambda *report: reports.append(report))
        await asked.ask(Leg(P, "/v1/completions", b"{}", ()), timeout_s=5)
        async with asked.stream(Leg(P, "/v1/completions", b"{}", ())) as stream:
            assert stream.status == 400
        assert (await asked.models(P, ())).status == 200

    assert reports == []
