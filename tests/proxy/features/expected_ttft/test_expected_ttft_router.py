"""The policy expected_ttft in a whole router: what it learns, shows and leaves behind."""

import asyncio
import contextlib
import re
from dataclasses import replace

import httpx
import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.core.model import Api
from pdrelay_proxy.features.expected_ttft.settings import EXPECTED_TTFT, ExpectedTtftSettings
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import FaultKind, Sim, SimulatedFault
from pdrelay_tools.simulated.rules import expected_text
from support.clock import Clock
from support.sim import InMemory, router, sims

WEIGHING = Settings(
    prefill_policy=EXPECTED_TTFT,
    decode_policy=EXPECTED_TTFT,
    admin_key="sesame",
    health_check_interval_s=0.0,
)
KEY = {"x-api-key": "sesame"}
LONG = "a long first question with a document in it, " * 40
EXPECTED = re.compile(
    r'expected;desc="queue=\d+\.\d prefill=\d+\.\d transfer=\d+\.\d decode=\d+\.\d '
    r'hits=(\d+),(\d+) of (\d+)";dur=\d+\.\d'
)


async def turn(client, messages, *, streams=True):
    """Ask, keep the answer, and return Server-Timing."""
    body = {"model": "sim", "messages": messages, "max_tokens": 8, "stream": streams}
    answer = await client.post(Api.CHAT, json=body)
    assert answer.status_code == 200, answer.text
    messages += [{"role": "assistant", "content": expected_text(body)}, {"role": "user", "content": "and then?"}]
    return answer.headers["server-timing"]


async def metrics(client):
    text = (await client.get("/metrics")).text
    return {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in text.splitlines()
        if line.startswith("pdrelay_instance_")
    }


class TimedSim(Sim):
    """An engine that takes so many seconds of the router's clock for each request, however busy the machine is."""

    def __init__(self, role, clock, seconds):
        super().__init__(role)
        self._clock, self._seconds = clock, seconds

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["method"] == "POST":
            self._clock.now += self._seconds
        await super().__call__(scope, receive, send)


def timed(clock, **seconds):
    """Engines by their names, and how long each takes."""
    return {name: TimedSim("prefill" if name[0] == "p" else "decode", clock, took) for name, took in seconds.items()}


def queued(found):
    return {value for name, value in found.items() if "queued_tokens" in name}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("streams", [False, True])
async def test_server_timing_shows_what_the_engines_were_chosen_by(mode, streams):
    """Whichever way the KV takes. Simulated engines take no time for a token, so there is one pair to choose."""
    engines = sims(1, 1, mode=mode)
    async with router(engines, WEIGHING) as client:
        messages = [{"role": "user", "content": LONG}]
        timings = [await turn(client, messages, streams=streams) for _ in range(4)]
        found = await metrics(client)

    shown = [EXPECTED.search(timing) for timing in timings]
    assert all(shown), timings
    hits = [tuple(map(int, one.groups())) for one in shown]
    assert hits[0][:2] == (0, 0)
    assert all(prefill > 0.8 * tokens and decode > 0.8 * tokens for prefill, decode, tokens in hits[1:])
    assert queued(found) == {0.0}
    assert not engines["d0"].violations


async def test_what_it_has_learned_is_in_the_metrics():
    """By engine, and nothing of that with another policy."""
    engines = sims(1, 1, prefill_s=0.02)
    async with router(engines, WEIGHING) as client:
        for _ in range(4):
            await turn(client, [{"role": "user", "content": LONG}])
        found = await metrics(client)
    async with router(sims(1, 1), Settings()) as client:
        await turn(client, [{"role": "user", "content": LONG}])
        none = await metrics(client)

    assert found['pdrelay_instance_prefill_tokens_per_second{instance="prefill-0"}'] > 0
    assert found['pdrelay_instance_inter_token_latency_seconds{instance="decode-0"}'] >= 0
    assert [name for name in none if "state" not in name] == []


async def test_a_slow_engine_gets_less():
    """By what its legs take."""
    clock = Clock()
    engines = timed(clock, p0=0.05, p1=0.005, d0=0.001)
    async with router(engines, WEIGHING, clock) as client:
        for number in range(40):
            await turn(client, [{"role": "user", "content": f"{number} {LONG}"}])

    assert len(engines["p0"].log) < 10


@pytest.mark.parametrize("itl_s", [0.0, 10.0])
async def test_a_decode_engine_serves_what_it_has_alone_only_where_it_may(itl_s):
    """The prefill engine takes 50 ms for anything, and the pause that streams may have decides."""
    clock = Clock()
    async with router(
        timed(clock, p0=0.05, d0=0.001), WEIGHING.with_features(ExpectedTtftSettings(itl_s)), clock
    ) as client:
        messages = [{"role": "user", "content": LONG}]
        timings = [await turn(client, messages) for _ in range(4)]
        question = {"path": Api.CHAT, "body": {"model": "sim", "messages": messages}}
        told = (await client.post("/instances/explain", json=question, headers=KEY)).json()

    alone = ['reason;desc="faster_alone"' in timing for timing in timings]
    assert ["cached;" in timing for timing in timings] == alone
    assert alone[1:] == [itl_s > 0] * 3
    assert (told["rule"] == "single: faster_alone") is (itl_s > 0)
    assert set(told["expected_ms"]) == {"queue", "prefill", "transfer", "decode", "ttft"}


async def test_a_turn_whose_engine_is_gone_is_routed_anew():
    """Another decode engine has nothing of the conversation: what was expected of the first one says nothing of it."""
    clock = Clock()
    engines = timed(clock, p0=0.05, d0=0.001, d1=0.001)
    network = InMemory(engines, clock)
    weighing = WEIGHING.with_features(ExpectedTtftSettings(10.0))
    settings = replace(weighing, prefill=("p0:80",), decode=("d0:80", "d1:80"), allowed_hosts=("*",))
    app = build(settings, fabric=network.fabric).app
    transport = httpx.ASGITransport(app)
    async with network.running(app), httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        messages = [{"role": "user", "content": LONG}]
        before = [await turn(client, messages) for _ in range(3)]
        gone, other = ("d0", "d1") if engines["d0"].log else ("d1", "d0")
        assert not engines[other].log
        del engines[gone]
        await network.close()
        after = await turn(client, messages)

    assert ['reason;desc="faster_alone"' in timing for timing in before[1:]] == [True, True]
    assert "unreachable" in after
    assert 'cached;desc="0 of ' in after or 'prefill;desc="prefill-0"' in after
    assert [int(hit) for hit in EXPECTED.search(after).groups()[1:2]] == [0]


async def test_a_request_that_one_engine_has_to_serve_shows_what_was_expected_of_it():
    """It has a queue to wait for, too, and leaves nothing in it."""
    async with router(sims(2, 2), WEIGHING) as client:
        body = {"model": "sim", "prompt": LONG, "max_tokens": 4, "best_of": 2}
        answer = await client.post("/v1/completions", json=body)
        found = await metrics(client)

    assert 'reason;desc="best_of"' in answer.headers["server-timing"]
    assert EXPECTED.search(answer.headers["server-timing"])
    assert queued(found) <= {0.0}


async def test_a_short_new_part_goes_to_the_decode_engine_by_the_plain_threshold_too():
    """Bytes are the simple choice, and need no rates."""
    clock = Clock()
    engines = {f"{role[0]}{number}": TimedSim(role, clock, 0.02) for role in ("prefill", "decode") for number in (0, 1)}
    async with router(engines, replace(WEIGHING, min_split_new_bytes=400), clock) as client:
        messages = [{"role": "user", "content": LONG}]
        timings = [await turn(client, messages) for _ in range(4)]

    assert ['reason;desc="cached_prompt"' in timing for timing in timings] == [False, True, True, True]
    assert all(map(EXPECTED.search, timings)), timings


async def test_a_request_that_is_sent_again_shows_what_was_expected_of_its_last_engines():
    """Both legs went out once more."""
    engines = sims(2, 1)
    async with router(engines, WEIGHING) as client:
        for name in ("p0", "p1"):
            engines[name].inject(SimulatedFault(FaultKind.STATUS, status=500, times=1))
        timings = [await turn(client, [{"role": "user", "content": f"{number} {LONG}"}]) for number in range(4)]

    assert sum("retry;" in timing for timing in timings) in (1, 2)
    assert all(map(EXPECTED.search, timings)), timings


async def test_a_decode_engine_whose_turn_it_is_alone_in_a_rollout_shows_what_was_expected():
    """Four old ones have one prefill engine left, and the other three are new, with one decode engine."""
    names = {"p0": 1, "p1": 2, "p2": 2, "p3": 2, "d0": 2, "d1": 1, "d2": 1, "d3": 1, "d4": 1}
    async with router(sims(4, 5), WEIGHING) as client:
        for row in (await client.get("/instances", headers=KEY)).json()["instances"]:
            await client.post("/instances/remove", json={"id": row["id"]}, headers=KEY)
        for name, revision in names.items():
            role = "prefill" if name[0] == "p" else "decode"
            told = {"type": role, "instance": f"{name}:80#revision={revision}"}
            assert (await client.post("/instances/add", json=told, headers=KEY)).status_code == 200
        timings = [await turn(client, [{"role": "user", "content": f"{number} {LONG}"}]) for number in range(12)]

    assert any('reason;desc="few_matching_engines"' in timing for timing in timings)
    assert all(map(EXPECTED.search, timings)), timings


async def ask(client, number):
    """Ask; every fourth client hangs up while the engines work."""
    body = {"model": "sim", "prompt": f"{number % 7} {LONG}", "max_tokens": 4, "stream": number % 3 > 0}
    with contextlib.suppress(httpx.TimeoutException, TimeoutError):
        async with asyncio.timeout(0.015 if number % 4 == 1 else 10):
            await client.post("/v1/completions", json=body)


async def idle(client):
    """Wait until no engine has a request."""
    async with asyncio.timeout(30):
        while any(row["in_flight"] for row in (await client.get("/instances", headers=KEY)).json()["instances"]):
            await asyncio.sleep(0)


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_whatever_happens_to_legs_nothing_is_left_in_the_queues(mode):
    """Failures, retries and clients that hang up: tokens that stay would keep an engine from requests for ever."""
    engines = sims(2, 2, mode=mode, prefill_s=0.01)
    settings = replace(WEIGHING, circuit_breaker_failures=0).with_features(ExpectedTtftSettings(0.05))
    faults = [("p0", FaultKind.STATUS), ("d1", FaultKind.DROP), ("d0", FaultKind.END), ("p1", FaultKind.DROP)]
    async with router(engines, settings) as client:
        for name, kind in faults:
            engines[name].inject(SimulatedFault(kind, status=500))
            await asyncio.gather(*(ask(client, number) for number in range(24)))
            engines[name].inject(None)
        await idle(client)
        found = await metrics(client)

    assert queued(found) == {0.0}
