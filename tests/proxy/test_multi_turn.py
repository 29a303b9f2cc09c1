"""Chats of several turns: a decode engine that has a conversation serves the next turn alone."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.routing.kv_reuse import reused_kv
from pdrelay_proxy.features.expected_ttft.settings import ExpectedTtftSettings
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.simulated.rules import expected_text
from support.sim import Sim, router, sims

STICKY = Settings(
    prefill_policy=PolicyName.PREFIX,
    decode_policy=PolicyName.PREFIX,
    min_split_new_bytes=400,
    admin_key="sesame",
    health_check_interval_s=0.0,
)
LONG = "a long first question with a document in it, " * 20
KEY = {"x-api-key": "sesame"}


class Chat:
    """One conversation, and how each of its turns was served."""

    def __init__(self, client, text=LONG, *, streams=False):
        self.client, self.streams = client, streams
        self.messages, self.timings = [], []
        self.next = text

    async def turn(self, text=None):
        """Say something, and keep the answer; return Server-Timing."""
        self.messages.append({"role": "user", "content": text or self.next})
        body = {"model": "sim", "messages": self.messages, "max_tokens": 8, "stream": self.streams}
        answer = await self.client.post(Api.CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert _text(answer, streams=self.streams) == expected_text(body)
        self.messages.append({"role": "assistant", "content": expected_text(body)})
        self.timings.append(answer.headers["server-timing"])
        self.next = f"and turn {len(self.messages)}?"
        return self.timings[-1]


def _text(answer, *, streams):
    if not streams:
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def is_alone(timing):
    return 'reason;desc="cached_prompt"' in timing


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("streams", [False, True])
async def test_later_turns_of_a_chat_are_served_by_its_decode_engine(mode, streams):
    """Their new part is short, and the prefill engine would compute the answers a second time."""
    engines = sims(mode=mode)
    async with router(engines, STICKY) as client:
        chat = Chat(client, streams=streams)
        for _ in range(5):
            await chat.turn()

    assert [is_alone(timing) for timing in chat.timings] == [False, True, True, True, True]
    assert len(engines["p0"].log) == 1
    size = len(json.dumps(chat.messages[:-1], separators=(",", ":"), ensure_ascii=False))
    assert f"of {size - 1} bytes" in chat.timings[-1]
    assert not engines["d0"].violations


async def test_short_prompts_are_split_and_their_follow_ups_are_not():
    """With ``reuse_kv``: what is new is a prefill engine's, and a short turn that follows is the decode engine's."""
    engines = sims(1, 1)
    async with router(engines, replace(STICKY, reuse_kv=True, **reused_kv({}, {}, ()))) as client:
        chat, other = Chat(client, "Hello?"), Chat(client, "Who is there?")
        for each in (chat, other):
            for _ in range(3):
                await each.turn()

    assert [is_alone(timing) for timing in chat.timings + other.timings] == [False, True, True] * 2
    assert len(engines["p0"].log) == 2
    assert not engines["p0"].violations + engines["d0"].violations


@pytest.mark.parametrize(
    ("changes", "alone"),
    [({"min_split_new_bytes": 0}, [False] * 3), ({"decode_policy": PolicyName.LEAST_LOADED}, [False] * 3)],
)
async def test_without_the_setting_or_the_memory_all_of_a_long_prompt_is_split(changes, alone):
    """As ever."""
    settings = {name: getattr(STICKY, name) for name in ("prefill_policy", "decode_policy", "min_split_new_bytes")}
    async with router(sims(), Settings(**settings | changes)) as client:
        chat = Chat(client)
        for _ in alone:
            await chat.turn()

    assert [is_alone(timing) for timing in chat.timings] == alone


def forgetful(cached):
    """A decode engine that tells how many of 1000 tokens it had in its cache."""

    async def answer(request):
        usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": cached()}}
        message = {"role": "assistant", "content": "yes"}
        said = json.dumps({"choices": [{"index": 0, "message": message}], "usage": usage}).encode()
        return httpx.Response(200, headers={"content-type": "application/json"}, stream=httpx.ByteStream(said))

    return answer


@pytest.mark.parametrize(("cached", "alone"), [(900, [True, True]), (100, [True, False])])
async def test_an_engine_that_has_evicted_a_conversation_says_so(cached, alone):
    """The next turn goes over a prefill engine, and an operator sees how often the guess was wrong."""
    engines = sims(1, 0) | {"d0": forgetful(lambda: cached)}
    asked, timings = [{"role": "user", "content": LONG}], []
    async with router(engines, STICKY) as client:
        for turn in range(3):
            answer = await client.post(Api.CHAT, json={"model": "sim", "messages": asked})
            timings.append(answer.headers["server-timing"])
            asked += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"turn {turn}"}]
        metrics = (await client.get("/metrics")).text

    assert [is_alone(timing) for timing in timings[1:]] == alone
    missed = 'pdrelay_prompt_cache_misses_total{instance="decode-0"} 1.0' in metrics
    assert missed == (not all(alone))


async def test_explain_shows_what_is_cached_and_leaves_no_trace():
    """The terms of the choice, by engine; asking twice brings the same."""
    async with router(sims(2, 2), STICKY) as client:
        chat = Chat(client)
        await chat.turn()
        new = {"role": "user", "content": "and?"}
        question = {"path": Api.CHAT.value, "body": {"model": "sim", "messages": [*chat.messages, new]}}
        answers = [await client.post("/instances/explain", json=question, headers=KEY) for _ in range(2)]
        other = {
            "path": Api.CHAT.value,
            "body": {"model": "sim", "messages": [{"role": "user", "content": f"x {LONG}"}]},
        }
        unknown = [(await client.post("/instances/explain", json=other, headers=KEY)).json() for _ in range(2)]

    found = answers[0].json()
    assert found == answers[1].json()
    assert found["rule"] == "single: cached_prompt"
    (prefill,) = set(found["cached_bytes"]) - {found["decode"]}
    assert found["prompt_bytes"] - 400 < found["cached_bytes"][found["decode"]] < found["prompt_bytes"]
    assert found["cached_bytes"][prefill] < found["cached_bytes"][found["decode"]]  # without the answer
    assert found["min_split_new_bytes"] == 400
    assert [said["cached_bytes"] for said in unknown] == [{}, {}]
    assert unknown[0]["rule"] == "prefill first, then decode"


QUESTION = "a question of a part of the bytes " * 7


class Gated(Sim):
    """A decode engine before which requests wait while its gate is closed."""

    def __init__(self):
        super().__init__("decode")
        self.gate = asyncio.Event()
        self.came = 0
        self.gate.set()

    async def __call__(self, scope, receive, send):
        self.came += 1
        await self.gate.wait()
        await super().__call__(scope, receive, send)

    async def until_come(self, count):
        """Wait until so many more requests have come."""
        count += self.came
        async with asyncio.timeout(30):
            while self.came < count:
                await asyncio.sleep(0)


@pytest.mark.parametrize("policy", [PolicyName.PREFIX, "expected_ttft"])
async def test_a_decode_engine_computes_no_more_than_the_threshold_at_a_time(policy):
    """Its streams wait for all prompts of a step: the second one is split, and an operator sees how often."""
    gated = Gated()
    engines = sims(1, 0) | {"d0": gated}
    settings = replace(STICKY, prefill_policy=policy, decode_policy=policy)
    async with router(engines, settings) as client:
        chats = [Chat(client, f"{number} {LONG}", streams=True) for number in range(2)]
        for chat in chats:
            await chat.turn()
        gated.gate.clear()
        turns = asyncio.gather(*(chat.turn(QUESTION) for chat in chats))
        await gated.until_come(2)
        gated.gate.set()
        timings = await turns
        metrics = (await client.get("/metrics")).text

    assert sorted(map(is_alone, timings)) == [False, True]
    assert 'pdrelay_lone_prompts_bound_total{outcome="split"} 1.0' in metrics


@pytest.mark.parametrize(("itl_s", "alone"), [(10.0, [True] * 3), (1e-9, [False] * 3)])
async def test_measured_times_bound_what_decode_engines_serve_alone_with_prefix_too(itl_s, alone):
    """However few bytes are new."""
    async with router(sims(1, 1, prefill_s=0.01), STICKY.with_features(ExpectedTtftSettings(itl_s))) as client:
        chat = Chat(client, streams=True)
        await chat.turn()
        timings = [await chat.turn() for _ in alone]

    assert [is_alone(timing) for timing in timings] == alone
