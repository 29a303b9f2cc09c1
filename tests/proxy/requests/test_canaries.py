"""Canaries: one in so many, one at a time, never of a busy engine, and what follows a difference."""

import asyncio
import json
import logging
from collections import Counter

import msgspec
import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Api, EngineResponse, GenerationRequest, RequestId, Role, SingleEngineReason
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.request_record import LegRecord, RequestRecord, Retry
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.requests.canaries import ANSWER_MOST, BUSY, Canaries, KeptResponse
from pdrelay_proxy.settings import Settings
from pdrelay_proxy.testing.engine import FaultKind, SimulatedFault
from support.sim import router, sims

BODY = {"prompt": "once upon a time", "temperature": 0, "max_tokens": 4}
CALL = GenerationRequest(Api.COMPLETIONS, msgspec.json.decode(json.dumps(BODY), type=dict[str, msgspec.Raw]), ())
PATIENCE_S = 30.0


class Writer:
    """Takes what a client would get."""

    keep_alive, begun, relay = True, False, print

    def __init__(self):
        self.got = b""

    def begin(self, status, lines, body, *, streams, last=False):
        self.got += body

    def write(self, piece, /):
        self.got += piece

    def end(self, piece=b"", /):
        self.got += piece

    def close(self):
        pass


def answer(text, status=200):
    logprobs = {"tokens": [text], "token_logprobs": [-0.1], "top_logprobs": [{text: -0.1}]}
    choice = {"text": text, "logprobs": logprobs, "finish_reason": "length"}
    return EngineResponse(status, "application/json", json.dumps({"choices": [choice]}).encode())


class World:
    """A prefill and a decode engine, what the first answers when it is asked alone, and what is said of the pair."""

    def __init__(self, every=1, says="right"):
        self.registry, self.counted, self.accused, self.asked = Registry(Settings()), Counter(), [], []
        for role in Role:
            self.registry.add(role, Address("http", "h", 1))
        self.says, self.gate = says, None
        self.canaries = Canaries(
            every, self, self.registry, self.counted, differs=lambda *accused: self.accused.append(accused),
            clock=lambda: 7.0,
        )  # fmt: skip

    async def ask(self, leg, *, timeout_s):
        self.asked.append(leg)
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.says, Exception):
            raise self.says
        return self.says if isinstance(self.says, EngineResponse) else answer(self.says)

    def over(self, shown="right", *, status=200, **changes):
        record = RequestRecord(RequestId("r1"), prefill=LegRecord("prefill-0"), decode=LegRecord("decode-0"))
        record.status = status
        for name, value in changes.items():
            setattr(record, name, value)
        kept = KeptResponse(Writer(), CALL)
        kept.begin(200, b"", json.dumps({"choices": [{"text": shown}]}).encode(), streams=False)
        self.canaries.over(record, kept)

    async def settled(self):
        """Wait for what is under way; return how it ended."""
        async with asyncio.timeout(PATIENCE_S):
            while self.canaries._background._tasks:
                await asyncio.sleep(0.001)
        return {name: count for (name,), count in self.counted.items() if count}


def test_one_in_so_many_requests_is_taken_or_the_next_that_is_suited():
    """What cannot be compared is not counted as one."""
    canaries = World(every=3).canaries
    sampled = GenerationRequest(Api.COMPLETIONS, CALL.fields | {"temperature": msgspec.Raw(b"1")}, ())
    asked = [CALL, CALL, sampled, sampled, CALL, CALL, CALL, CALL]

    assert [canaries.takes(call) for call in asked] == [False, False, False, False, True, False, False, True]


async def test_an_equal_text_is_counted_and_nothing_else():
    """The prefill engine is asked, under a name of its own."""
    world = World()
    world.over()

    assert await world.settled() == {"equal": 1}
    leg = world.asked[0]
    assert (leg.instance.id, leg.path, dict(leg.headers)) == (
        "prefill-0", "/v1/completions", {b"x-request-id": b"r1-canary"},
    )  # fmt: skip
    assert "kv_transfer_params" not in json.loads(leg.body)
    assert world.accused == []


async def test_another_text_accuses_the_pair_and_the_log_does_not_tell_the_text(caplog):
    """Texts are the client's."""
    world = World()
    world.over("secret words")

    assert await world.settled() == {"different": 1}
    assert world.accused == [(("prefill-0", "decode-0"), 7.0)]
    warning = next(record for record in caplog.records if record.levelno == logging.WARNING)
    assert "r1: prefill-0 alone" in warning.getMessage()
    assert "secret" not in caplog.text
    assert "right" not in caplog.text


@pytest.mark.parametrize("says", [EngineError("it broke off"), answer("x", status=400)])
async def test_an_engine_that_does_not_answer_well_accuses_nobody(says):
    """The client has its answer long since."""
    world = World(says=says)
    world.over()

    assert await world.settled() == {"failed": 1}
    assert world.accused == []


@pytest.mark.parametrize(
    "changes",
    [
        {"single_reason": SingleEngineReason.ONE_LEG},
        {"decode": None},
        {"retries": [Retry(LegRecord("decode-1"), Failure.REFUSED, Role.DECODE)]},
        {"error": "it broke off"},
        {"status": 503},
        {"prefill": LegRecord("prefill-9")},  # removed meanwhile
    ],
)
async def test_what_was_not_served_well_by_one_pair_is_not_repeated(changes):
    """Whose KV it was would not be known."""
    world = World()
    world.over(**changes)

    assert await world.settled() == {"skipped": 1}
    assert world.asked == []


async def test_a_busy_engine_repeats_nothing():
    """Its clients come first."""
    world = World()
    load = world.registry.member("prefill-0").load
    load.elsewhere = BUSY
    world.over()

    assert await world.settled() == {"skipped": 1}


async def test_one_is_under_way_at_a_time():
    """A slow engine does not pile them up."""
    world = World()
    world.gate = asyncio.Event()
    world.over()
    world.over()
    world.gate.set()

    assert await world.settled() == {"equal": 1, "skipped": 1}


async def test_a_long_answer_reaches_its_client_and_is_not_kept():
    """Memory is bounded."""
    writer = Writer()
    kept = KeptResponse(writer, CALL)
    kept.begin(200, b"", b"a", streams=True)
    for _ in range(3):
        kept.write(b"b" * (ANSWER_MOST // 2))
    kept.end(b"c")

    assert kept.body is None
    assert writer.got == b"a" + b"b" * (ANSWER_MOST // 2 * 3) + b"c"


async def test_a_routers_clients_get_the_same_and_their_requests_are_repeated():
    """Over the wire: streams and whole answers, with text and chats."""
    engines = sims(1, 1)
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}
    async with router(engines, Settings(canary_every=2)) as client:
        for fields in ({}, {"stream": True}, {"temperature": 1}, {}, {"stream": True}):
            response = await client.post("/v1/completions", json=BODY | fields)
            assert response.status_code == 200
        for stream in (False, True):
            assert (await client.post("/v1/chat/completions", json=chat | {"stream": stream})).status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            while 'pdrelay_canaries_total{outcome="equal"} 3.0' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)

    names = [entry.headers["x-request-id"] for entry in engines["p0"].log]
    assert sum(name.endswith("-canary") for name in names) == 3
    assert not any(entry.headers["x-request-id"].endswith("-canary") for entry in engines["d0"].log)


async def test_a_pair_whose_texts_are_wrong_rests():
    """Two of them are enough; the other pair gets its requests."""
    engines = sims(1, 2)
    engines["d0"].inject(SimulatedFault(FaultKind.WRONG))
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}
    async with router(engines, Settings(canary_every=1)) as client:
        async with asyncio.timeout(PATIENCE_S):
            number = 0
            while "pdrelay_pairs_resting 1.0" not in (await client.get("/metrics")).text:
                path, body = (("completions", BODY), ("chat/completions", chat))[number // 2 % 2]
                assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
                number += 1
        served = [(await client.post("/v1/completions", json=BODY)).headers["server-timing"] for _ in range(6)]
        metrics = (await client.get("/metrics")).text

    assert 'pdrelay_canaries_total{outcome="different"} 2.0' in metrics
    assert 'pdrelay_pair_failures_total{reason="wrong_kv"} 2.0' in metrics
    assert all("decode-1" in each for each in served)
