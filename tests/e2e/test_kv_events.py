"""An engine's KV events over its own HTTP server, on a real engine: what a reader knows is what is cached."""

import itertools
import json
import tempfile
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from pdrelay_tools.local.recipe import kv_events_config
from support.cluster import MODEL_NAME, engine_spec, start_engine, wait_until
from support.kv_event_follower import Follower
from support.kv_events import decoded
from support.shapes import random_questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PATH = "/v1/pdrelay/kv_events"
KEY = "only-for-this-test"
BLOCKS, SIZE = 40, 32
_markers = itertools.count(1)
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def engine(fleet, model):
    """One engine with a small cache, whose events only this user can follow; it has no connector."""
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as folder:  # only this user may enter it
        events = kv_events_config(Path(folder), "events")
        small = ("--enable-prefix-caching", "--num-gpu-blocks-override", str(BLOCKS), "--enable-prompt-tokens-details")
        spec = engine_spec(
            "events", model, block_size=SIZE, max_model_len=1024,
            extra_args=(*small, "--kv-events-config", json.dumps(events)),
            extra_env={"VLLM_API_KEY": KEY, "VLLM_PLUGINS": "pdrelay,pdrelay_kv_events"},
        )  # fmt: skip
        child = start_engine(fleet, spec)
        fleet.wait_ready([child], timeout_s=300)
        yield spec
        fleet.stop(child)


@pytest.fixture
def mark(engine):
    """Have the engine cache a block that no other prompt has, and return its prompt."""

    def ask():
        number = next(_markers)
        prompt = [20 + (number * place + place * place) % 470 for place in range(1, SIZE + 2)]
        assert cached(engine, prompt) == 0
        return prompt

    return ask


def cached(spec, prompt):
    """Ask for one token, and return how many of the prompt's were cached."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{spec.base_url}/v1/completions", json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def prompts_of(seed):
    """Return three times as many blocks as the cache has, of prompts that begin alike, too."""
    prompts = [list(question.prompt) for question in random_questions([40 + 23 * n for n in range(12)], seed=seed)]
    return [*prompts, prompts[5][:70] + prompts[2][:60], prompts[11][:200]] * 2


def test_what_a_reader_knows_is_what_is_cached(engine, mark):
    """While blocks are stored and evicted: each prompt hits what the blocks say, whenever the reader came."""
    prompts = prompts_of("events")
    with closing(Follower(engine.base_url + PATH, HEADERS, SIZE)) as early:
        found = []
        for prompt in prompts:
            early.wait(mark())
            found.append((early.hit(prompt), cached(engine, prompt)))
        last = mark()
        early.wait(last)
        with closing(Follower(engine.base_url + PATH, HEADERS, SIZE)) as late:
            late.wait(last)

            assert late.reader.names() == early.reader.names()
            assert late.hit(prompts[-1]) == early.hit(prompts[-1]) > 0
    removed = [e for batch in early.reader.batches for e in decoded(batch).events if type(e).__name__ == "BlockRemoved"]

    assert [said for said, _ in found] == [hit for _, hit in found]
    assert removed  # the cache is a third of the prompts
    assert sum(hit for _, hit in found) > 0


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another"}], ids=["no key", "another key"])
def test_nobody_reads_without_the_key(engine, headers):
    """Events contain the prompts of others."""
    assert httpx.get(engine.base_url + PATH, headers=headers, timeout=10).status_code == 401


def test_readers_have_a_limit(engine):
    """One more is told so; when one has left, another may come."""
    followers = [Follower(engine.base_url + PATH, HEADERS, SIZE) for _ in range(64)]
    try:
        wait_until(lambda: all(each.reader.complete for each in followers), seconds=20, what="all are served")
        refused = httpx.get(engine.base_url + PATH, headers=HEADERS, timeout=10)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("64 connections read this engine's KV events")
    finally:
        for follower in followers:
            follower._closing = True
        for follower in followers:
            follower.close()

    def is_served():
        with closing(Follower(engine.base_url + PATH, HEADERS, SIZE)) as again:
            wait_until(lambda: again.reader.complete or again.status == 503, seconds=20, what="an answer")
            return bool(again.reader.complete)

    wait_until(is_served, seconds=20, what="a reader is served again")


def test_what_the_router_knows_is_what_is_cached(engine, start_router, mark):
    """Its index of the engine's blocks says what each prompt will hit, and that is what vLLM counts.

    It is the last test here: the router goes on reading.
    """
    keys = {"ADMIN_API_KEY": KEY, "PDRELAY_PREFILL_API_KEY": KEY, "PDRELAY_DECODE_API_KEY": KEY}
    args = ("--kv-events", "auto", "--prefill-policy", "prefix")
    url = start_router("router-events", [engine], [engine], args=args, env=keys)

    def told(prompt):
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}
        question = {"path": "/v1/completions", "body": body}
        answer = httpx.post(f"{url}/instances/explain", json=question, headers={"x-api-key": KEY}, timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.json()["cached_tokens"]

    def wait(marker):
        everywhere = {"prefill-0": SIZE, "decode-0": SIZE}
        wait_until(lambda: told(marker) == everywhere, seconds=20, what="the router knows all")

    found = []
    for prompt in prompts_of("router"):
        wait(mark())
        found.append((told(prompt), cached(engine, prompt)))

    assert [said for said, _ in found] == [{"prefill-0": hit, "decode-0": hit} for _, hit in found]
    assert sum(hit for _, hit in found) > 0
