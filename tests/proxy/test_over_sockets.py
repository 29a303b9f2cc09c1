"""What only real connections show: hanging up, breaking off, and bytes that arrive while others are being made."""

import json

import httpx
import openai
import pytest

from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from pdrelay_tools.simulated.rules import expected_text
from support.sim import cluster, until

pytestmark = pytest.mark.edges


BODY = {"prompt": "once upon a time", "max_tokens": 5}
LONG = {"prompt": "once upon a time", "max_tokens": 100_000, "stream": True}


def post(running, body=BODY, path="/v1/completions"):
    return httpx.post(f"http://{running.router}{path}", json=body, timeout=20)


def test_a_stream_is_passed_on_as_it_comes():
    """The first token is with the client while the engine is still making the others."""
    with cluster() as running, httpx.Client() as client:
        running.engines["d0"].inject(SimulatedFault(FaultKind.STALL, after=3))
        body = LONG | {"max_tokens": 10}
        with client.stream("POST", f"http://{running.router}/v1/completions", json=body, timeout=20) as response:
            events = response.iter_lines()
            seen = [line for line in (next(events) for _ in range(6)) if line]

        assert [json.loads(line.removeprefix("data: "))["choices"][0]["index"] for line in seen] == [0, 0, 0]


@pytest.mark.parametrize("point", ["prefill", "decode head", "decode stream", "whole decode"])
def test_a_client_that_hangs_up_stops_the_engines(point):
    """At once: every token after that is made for nobody, at the cost of somebody else."""
    body = BODY if point == "whole decode" else LONG
    where = "p0" if point == "prefill" else "d0"
    with cluster() as running:
        sim = running.engines[where]
        sim.inject(SimulatedFault(FaultKind.STALL, after=3 if point == "decode stream" else None))
        with running.open("/v1/completions", body) as client:
            if point == "decode stream":
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
            until(lambda: len(sim.log) == 1)
            assert sim.log[0].state == "open"
        until(lambda: sim.log[0].state == "hung up")

        sim.inject(None)
        assert post(running).json()["choices"][0]["text"] == expected_text(BODY)
        if point == "prefill":
            assert len(running.engines["d0"].log) == 1


def test_the_official_client_raises_when_a_stream_breaks_off():
    """The error event is there for it: half an answer must not look like a whole one."""
    with cluster() as running, openai.OpenAI(base_url=f"http://{running.router}/v1", api_key="k", max_retries=0) as sdk:
        for fault in (SimulatedFault(FaultKind.DROP, after=2), SimulatedFault(FaultKind.END, after=2)):
            running.engines["d0"].inject(fault)
            stream = sdk.completions.create(model="sim", prompt="hi", max_tokens=5, stream=True)
            assert [next(stream).choices[0].index for _ in range(2)] == [0, 0]
            with pytest.raises(openai.APIError, match="decode-0"):
                next(stream)
