"""What one client can see of another: whatever another key has sent before, an answer is the same."""

import json
import random
import re

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.settings import PolicyName, Settings
from support.clock import Clock
from support.sim import router, sims

ALICE, BOB = ({"authorization": f"Bearer key-of-{name}-16-chars"} for name in ("alice", "bob"))
SECRET = "the PIN of the safe is 4711, and nobody else may know it, " * 12
OTHER = "the name of the ship is Argo, and it comes into port today, " * 12  # as long
CHANGING = re.compile(r"[0-9a-f]{16,}|dur=[0-9.]+")  # ids, and milliseconds
POLICIES = {
    "prefix": {"prefill_policy": PolicyName.PREFIX, "decode_policy": PolicyName.PREFIX},
    "expected_ttft": {"prefill_policy": "expected_ttft", "decode_policy": "expected_ttft"},
    "round_robin": {},
}
IDS = {SECRET: list(range(700)), OTHER: list(range(1000, 1700))}


def asked(api, text, **more):
    chat = [{"role": "user", "content": text}]
    body = {
        Api.COMPLETIONS: {"prompt": text, "max_tokens": 4},
        Api.CHAT: {"messages": chat, "max_tokens": 4},
        Api.RESPONSES: {"input": text, "max_output_tokens": 4},
        Api.MESSAGES: {"messages": chat, "max_tokens": 4},
        Api.GENERATE: {"token_ids": IDS[text], "sampling_params": {"max_tokens": 4}},
    }[api]
    return {"model": "sim", **body, **more}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice:key-of-alice-16-chars\nbob:key-of-bob-16-chars\n")
    return str(path)


async def seen_by_bob(before, wanted, settings, *, mode="pull"):
    """Return what Bob gets for a request, twice, after Alice has sent another one three times."""
    random.seed(7)  # ties between engines are broken by chance
    engines = sims(3, 3, mode=mode, cache_blocks=500)
    async with router(engines, settings, Clock()) as client:
        for _ in range(3):
            assert (await client.post(before[0], json=before[1], headers=ALICE)).status_code == 200
        answers = [await client.post(wanted[0], json=wanted[1], headers=BOB) for _ in range(2)]
    legs = [name for name, engine in engines.items() for entry in engine.log if entry.path == wanted[0]]
    assert [answer.status_code for answer in answers] == [200, 200]
    texts = [str(answer.headers.raw) + answer.text for answer in answers]
    return [re.sub(r'"created(_at)?": ?\d+', "", CHANGING.sub("", text)) for text in texts], legs


CASES = [(api, "prefix", {}) for api in Api] + [
    (Api.CHAT, "expected_ttft", {}),
    (Api.COMPLETIONS, "expected_ttft", {"stream": True}),
    (Api.CHAT, "prefix", {"stream": True}),
    (Api.MESSAGES, "prefix", {"cache_salt": "mine"}),
    (Api.CHAT, "round_robin", {}),
]


@pytest.mark.parametrize(("api", "policy", "more"), CASES)
async def test_an_answer_does_not_depend_on_what_another_key_has_cached(api, policy, more, keys):
    """Neither its headers nor its usage nor the engines that it comes from: a PIN could be guessed by each of them."""
    settings = Settings(api_keys_file=keys, health_check_interval_s=0.0, min_split_new_bytes=64, **POLICIES[policy])
    wanted = api, asked(api, SECRET, **more)

    after_the_same = await seen_by_bob(wanted, wanted, settings)
    after_another = await seen_by_bob((api, asked(api, OTHER, **more)), wanted, settings)

    assert after_the_same == after_another
    assert not any(word in after_the_same[0][0] for word in ("cached;", "expected;", "hits="))


async def salts_of(settings, requests):
    """Return the salts that engines get, by leg."""
    engines = sims(1, 1)
    async with router(engines, settings) as client:
        for path, body, headers in requests:
            await client.post(path, json=body, headers=headers)
    return [json.loads(entry.body).get("cache_salt") for engine in engines.values() for entry in engine.log]


ERRANDS = ("/v1/embeddings", "/pooling", "/score", "/v1/chat/completions/batch", "/generative_scoring")


@pytest.mark.parametrize("path", [*Api, *ERRANDS])
async def test_every_request_of_several_keys_has_a_salt_on_each_leg(path, keys):
    """Also those that one engine serves, and arrays."""
    bodies = [asked(path, SECRET)] if path in list(Api) else [{"input": "a"}]
    if path is Api.COMPLETIONS:
        bodies += [{"prompt": ["a", "b"], "max_tokens": 3}, {"prompt": "a", "n": 2, "max_tokens": 3}]
    settings = Settings(api_keys_file=keys)
    of = {
        name: await salts_of(settings, [(path, body, headers) for body in bodies])
        for name, headers in (("alice", ALICE), ("bob", BOB))
    }

    assert of["alice"]
    assert {len(set(salts)) for salts in of.values()} == {1}
    assert len({of["alice"][0], of["bob"][0], None}) == 3


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ("alice:key-of-alice-16-chars\n", {}),
        ("alice:key-of-alice-16-chars\nalice:key-of-alice-17-chars\n", {}),
        ("alice:key-of-alice-16-chars\nbob:key-of-bob-16-chars\n", {"cache_salt_per_key": False}),
    ],
)
async def test_one_client_or_the_operators_word_changes_nothing(tmp_path, lines, options):
    """A name may have two keys, as while one is replaced: that is one client."""
    (tmp_path / "keys").write_text(lines)
    settings = Settings(api_keys_file=str(tmp_path / "keys"), **options)
    request = Api.COMPLETIONS, asked(Api.COMPLETIONS, SECRET), ALICE

    assert await salts_of(settings, [request]) == [None, None]


async def test_the_operator_may_have_the_cache_told(keys):
    """Who says server_timing gets all of it."""
    settings = Settings(api_keys_file=keys, server_timing=True, min_split_new_bytes=64, **POLICIES["prefix"])
    body = asked(Api.CHAT, SECRET)
    async with router(sims(1, 1), settings) as client:
        answers = [await client.post(Api.CHAT, json=body, headers=ALICE) for _ in range(2)]

    assert 'reason;desc="cached_prompt", cached;desc="' in answers[1].headers["server-timing"]


async def test_a_single_engine_does_not_say_that_it_had_the_prompt(keys):
    """How a request was served shows; that a cache was the reason does not."""
    settings = Settings(api_keys_file=keys, min_split_new_bytes=64, **POLICIES["prefix"])
    body = asked(Api.CHAT, SECRET)
    async with router(sims(1, 1), settings) as client:
        answers = [await client.post(Api.CHAT, json=body, headers=ALICE) for _ in range(2)]

    assert answers[1].headers["server-timing"].startswith('mode;desc="single", decode;desc="decode-0";dur=')


async def test_a_client_cannot_ask_about_an_image_of_another(keys):
    """vLLM's cache of media goes by the id that a request gives them, whoever sends it."""
    part = {"type": "image_url", "image_url": None, "uuid": "photo-1"}
    body = {"model": "sim", "messages": [{"role": "user", "content": [{"type": "text", "text": "who?"}, part]}]}
    async with router(sims(1, 1), Settings(api_keys_file=keys)) as client:
        answer = await client.post(Api.CHAT, json=body, headers=BOB)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "uuid")
