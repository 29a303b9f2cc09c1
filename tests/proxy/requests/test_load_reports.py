"""Prefill engines say how busy they are, where the choice of them goes by that."""

import httpx
import pytest

from pdrelay_proxy.core.fleet.load import ASK_FOR_REPORT
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.engine import Sim
from support.sim import router, sims

BODY = {"prompt": "once upon a time", "max_tokens": 2}
BUSY = 'JSON {"named_metrics": {"num_requests_waiting": 9.0}}'
ASKED = ASK_FOR_REPORT[0].decode()
HOW = ASK_FOR_REPORT[1].decode()


class Reporting:
    """A pretended engine that says how busy it is with every answer, asked or not."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        response = await httpx.ASGITransport(self.sim).handle_async_request(request)
        response.headers["endpoint-load-metrics"] = BUSY
        return response


async def served(engines, settings, *, times=1):
    """Have so many requests served, one by one; returns the answers."""
    async with router(engines, settings) as client:
        return [await client.post("/v1/completions", json=BODY) for _ in range(times)]


async def test_a_prefill_leg_asks_for_a_report_and_the_next_choice_goes_by_it():
    """In vLLM's own header, and of the prefill engine alone; the client sees nothing of it."""
    fleet = sims(2, 1)
    engines = fleet | {"p0": Reporting(fleet["p0"])}

    answers = await served(engines, Settings(prefill_policy=PolicyName.LEAST_LOADED), times=4)

    assert [len(fleet[name].log) for name in ("p0", "p1")] == [1, 3]
    assert {entry.headers.get(ASKED) for name in ("p0", "p1") for entry in fleet[name].log} == {HOW}
    assert {entry.headers.get(ASKED) for entry in fleet["d0"].log} == {None}
    assert {answer.status_code for answer in answers} == {200}
    assert not [name for answer in answers for name in answer.headers if "load" in name]


@pytest.mark.parametrize(
    "settings",
    [Settings(prefill_policy=PolicyName.LEAST_LOADED, load_reports=False), Settings()],
    ids=["switched off", "round robin"],
)
async def test_where_no_choice_goes_by_it_nobody_is_asked(settings):
    """And what an engine says unasked counts for nothing."""
    fleet = sims(2, 1)
    engines = fleet | {"p0": Reporting(fleet["p0"])}

    await served(engines, settings, times=4)

    assert [len(fleet[name].log) for name in ("p0", "p1")] == [2, 2]
    assert {entry.headers.get(ASKED) for name in ("p0", "p1") for entry in fleet[name].log} == {None}
