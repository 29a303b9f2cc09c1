"""Whatever a client sends: a clear answer in OpenAI's shape, engines that live, nothing held afterwards."""

import json

import httpx
import openai
import pytest

from pdrelay_tools.proving.checks.handovers import MALFORMED
from support.cluster import SOON, Watch, nothing_held, wait_until
from support.questions import TOKENS, Question, Shape, ask, client, differences, ids

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LOADED = "vllm:prompt_tokens_by_source_total|external_kv_transfer"
PATHS = ("/v1/completions", "/v1/chat/completions")
GOOD = {
    "/v1/completions": {"model": "tiny", "prompt": "a quiet river", "max_tokens": 4},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a quiet river"}],
        "max_tokens": 4,
    },
}
REMOTE = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]], "remote_engine_id": "x"}


def post(url, path, content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"}
    return httpx.post(url + path, content=data, headers=headers, timeout=60, trust_env=False)


def with_fields(path, **fields):
    return {**GOOD[path], **fields}


BAD = {
    "not JSON": lambda path: b"{not json",
    "not an object": lambda path: b"[1, 2]",
    "empty body": lambda path: b"",
    "no model and an empty prompt": lambda path: {"prompt": "", "messages": []},
    "unknown model": lambda path: with_fields(path, model="nobody"),
    "negative max_tokens": lambda path: with_fields(path, max_tokens=-1),
    "too many max_tokens": lambda path: with_fields(path, max_tokens=10**9),
    "wrong types": lambda path: with_fields(path, prompt={"a": 1}, messages="hello", temperature="hot"),
    "kv params": lambda path: with_fields(path, kv_transfer_params={"do_remote_prefill": True}),
    "full kv params": lambda path: with_fields(path, kv_transfer_params=REMOTE),
    "encoder params": lambda path: with_fields(path, ec_transfer_params={"do_remote": True}),
    "20 MB": lambda path: with_fields(path, user="x" * 20_000_000),
    "deep nesting": lambda path: b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a prompt longer than the model takes": lambda path: with_fields(
        path, prompt="river " * 5000, messages=[{"role": "user", "content": "river " * 5000}]
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_clear_error(one_pair, engines, name, path):
    """4xx with a message that says what is wrong; both engines serve on and hold nothing."""
    reply = post(one_pair, path, BAD[name](path))

    assert 400 <= reply.status_code < 500, reply.text[:500]
    error = reply.json()["error"]
    assert set(error) >= {"message", "type", "code"}
    assert len(error["message"]) > 10
    for spec in (engines.p0, engines.d0):
        assert httpx.get(f"{spec.base_url}/health", trust_env=False).status_code == 200
        wait_until(lambda spec=spec: nothing_held(spec), seconds=SOON, what=f"{spec.name} holds nothing")


@pytest.fixture
def official_client(one_pair):
    """What most users have."""
    with openai.OpenAI(base_url=f"{one_pair}/v1", api_key="unused", max_retries=0, timeout=120) as api:
        yield api


def test_the_official_client_reads_what_the_suite_reads(official_client, reference_answer):
    """All other tests read answers as ``pdrelay prove`` does."""
    words = "copper garden seven letter " * 9
    common = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS}
    messages = [{"role": "user", "content": words}]
    stream = official_client.chat.completions.create(messages=messages, stream=True, **common)
    said = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    whole = official_client.completions.create(prompt=words, logprobs=2, **common)
    chat, completion = (reference_answer(Question(shape, words)) for shape in (Shape.CHAT, Shape.TEXT))

    assert said == chat.text
    assert whole.choices[0].text == completion.text
    assert tuple(whole.choices[0].logprobs.tokens) == completion.choices[0].tokens
    assert whole.usage.prompt_tokens == completion.prompt_tokens


def test_a_mixed_up_offer_never_becomes_a_wrong_answer(engines, reference_answer):
    """A router that gives one request another one's KV params: D notices and computes the prompt itself.

    The blocks stay for the request that they were computed for, which may yet come.
    """
    mine, other = ([(step * i) % 450 + 20 for i in range(70)] for step in (7, 11))
    one_token = {"model": "tiny", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    with Watch(engines.p0) as prefill, Watch(engines.d0) as decode:
        params = post(engines.p0.base_url, "/v1/completions", {**one_token, "prompt": mine}).json()[
            "kv_transfer_params"
        ]
        for prompt in (other, mine):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "kv_transfer_params": params}
            text = post(engines.d0.base_url, "/v1/completions", body).json()["choices"][0]["text"]
            assert text == reference_answer(ids(prompt)).text

    assert decode.delta(LOADED) == len(mine) - 1
    assert prefill.delta("vllm:pdrelay_leases_done_total") == 1


@pytest.mark.parametrize("params", MALFORMED)
def test_malformed_params_never_kill_a_decode_engine(engines, reference_answer, params):
    """vLLM's own connector dies of the first one (seen on 0.32); ours computes the prompt itself."""
    prompt = [(23 * i) % 450 + 20 for i in range(70)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "kv_transfer_params": params}
    answer = post(engines.d0.base_url, "/v1/completions", body).json()

    assert answer["choices"][0]["text"] == reference_answer(ids(prompt)).text
    assert httpx.get(f"{engines.d0.base_url}/health", trust_env=False).status_code == 200


def test_the_engines_still_agree(one_pair, reference_answer):
    """After all of the above an ordinary question gets its ordinary answer."""
    question = Question(Shape.TEXT, stream=True, prompt="copper garden seven letter " * 20)
    with client(one_pair) as api:
        assert differences(ask(api, question), reference_answer(question)) == []
