"""Texts and chats go where they are cached, as engines tell it: prefill engines tell their tokens."""

import json
from dataclasses import replace

import httpx
import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.settings import KvTransferMode
from pdrelay_tools.simulated.rules import expected_text, prompt_ids
from support.cache_followers import FOLLOWING
from support.cache_followers import explained as explained_by
from support.sim import cluster, until

pytestmark = pytest.mark.edges


LONG = "a long first question with a document in it, " * 20


def chat(*texts, **more):
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "sim", "messages": messages, "max_tokens": 8, **more}


def path(body):
    return Api.CHAT if "messages" in body else Api.COMPLETIONS


def ask(found, body):
    """Return the text, and whether one decode engine has served the request alone."""
    answer = httpx.post(f"http://{found.router}{path(body)}", json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if "messages" in body else choice["text"]
    assert text == expected_text(body)
    return text, 'reason;desc="cached_prompt"' in answer.headers["server-timing"]


def explained(found, body):
    return explained_by(found.router, path(body), body)


def knows(found, body, tokens):
    """Wait for the tokens that engines are known to have."""
    until(lambda: explained(found, body)["cached_tokens"] == tokens)


def has(found, said, tokens):
    """Wait until the decode engine is known to have so many tokens of a chat."""
    until(lambda: explained(found, chat(*said))["cached_tokens"]["decode-0"] == tokens)


def followed(found):
    """Wait until every engine's events are followed."""
    ids = {"model": "sim", "prompt": [1, 2, 3]}
    until(lambda: len(explained(found, ids)["cached_tokens"]) == len(found.engines))


def whole(body):
    """Return the tokens of the full blocks of a prompt: the last one is always computed."""
    prompt = body.get("messages", body.get("prompt"))
    return (len(prompt_ids(prompt)) - 1) // 16 * 16


def asked_for_ids(found, name="p0"):
    return [json.loads(entry.body).get("return_token_ids") for entry in found.engines[name].log]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    "body", [chat(LONG), chat(LONG, cache_salt="mine"), {"model": "sim", "prompt": LONG}], ids=["chat", "salt", "text"]
)
def test_what_engines_have_of_a_text_is_known_by_their_events(body, mode):
    """Also what another router has sent there, and what is gone."""
    settings = replace(FOLLOWING, kv_transfer_mode=KvTransferMode(mode))
    with cluster(1, 2, settings, cache_blocks=200, mode=mode) as found:
        followed(found)
        assert explained(found, body)["cached_tokens"] == {}
        ask(found, body)
        until(lambda: sorted(explained(found, body)["cached_tokens"].values()) == [0, whole(body), whole(body)])
        for name in ("d0", "d1"):
            found.engines[name].cache.clear()
        knows(found, body, {"prefill-0": whole(body), "decode-0": 0, "decode-1": 0})
        found.engines["d1"].cache.use(prompt_ids(body.get("messages", body.get("prompt"))), body.get("cache_salt"))
        knows(found, body, {"prefill-0": whole(body), "decode-0": 0, "decode-1": whole(body)})
        known = explained(found, body)
        _, is_alone = ask(found, body)

    assert is_alone
    assert known["decode"] == "decode-1"
    assert set(known["cached_known_by"].values()) == {"events"}
    assert known["cached_bytes"].keys() == {"prefill-0", "decode-1"}
    assert asked_for_ids(found) == [True]


@pytest.mark.parametrize(
    "body",
    [
        chat(LONG) | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": LONG}}]}]},
        {"model": "sim", "prompt": list(range(100, 600)), "max_tokens": 8},
    ],
    ids=["image", "ids"],
)
def test_engines_are_not_asked_for_ids_that_are_of_no_use(body):
    """Those of images have more in their blocks, and prompts of ids have them."""
    with cluster(1, 1, FOLLOWING, cache_blocks=200) as found:
        followed(found)
        answer = httpx.post(f"http://{found.router}{path(body)}", json=body, timeout=20)

    assert answer.status_code == 200
    assert asked_for_ids(found) == [None]


def test_what_becomes_of_ids_is_counted():
    """And their memory is shown."""
    with cluster(1, 1, FOLLOWING, cache_blocks=200) as found:
        followed(found)
        ask(found, chat(LONG))
        shown = "pdrelay_known_prompts_total"
        until(lambda: f'{shown}{{event="learned"}} 1.0' in httpx.get(f"http://{found.router}/metrics", timeout=20).text)
        lines = httpx.get(f"http://{found.router}/metrics", timeout=20).text.splitlines()

    (size,) = (float(line.split()[1]) for line in lines if line.startswith("pdrelay_known_prompt_bytes "))
    assert 5_000 < size < 50_000
