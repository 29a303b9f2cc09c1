"""The prefill engine's token shown at once, on real engines: the streams of one engine, and when the first byte comes.

What is measured is printed: ``pytest -s tests/e2e/test_first_token.py`` makes the numbers of docs/first-token.md.
"""

import http.client
import json
import os
import random
import signal
import statistics
import time
from dataclasses import dataclass

import pytest

from support.cluster import Watch, nothing_held, wait_until
from support.questions import WORDS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STREAMS = 200
LOADS = "vllm:xpyd_loads_total"
USAGE = {"include_usage": True}


@dataclass(frozen=True)
class Streamed:
    """One stream: what must be equal, and when it began."""

    text: str
    finish: str
    stop: int | None
    usage: tuple
    ids: int  # different ids, and roles
    roles: int
    first_ms: float
    timing: str


def asked(address, body):
    """Send a request; return its connection and the response whose head is here."""
    connection = http.client.HTTPConnection(address, timeout=60)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection, connection.getresponse()


def read(address, body, on_first=lambda: None):
    """Return what a stream says; ``on_first`` is called when its first line is here."""
    start = time.perf_counter()
    connection, answer = asked(address, body)
    first = answer.readline()
    first_ms = (time.perf_counter() - start) * 1000
    on_first()
    lines = [line for line in (first + answer.read()).decode().splitlines() if line.startswith("data: ")]
    connection.close()
    assert (answer.status, lines[-1]) == (200, "data: [DONE]"), lines
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    (end,) = [choice for choice in choices if choice["finish_reason"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    return Streamed(
        "".join(texts),
        end["finish_reason"],
        end.get("stop_reason"),
        tuple(usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")),
        len({chunk["id"] for chunk in chunks}),
        sum("role" in choice.get("delta", {}) for choice in choices),
        first_ms,
        answer.headers.get("server-timing", ""),
    )


def bodies(count, *, seed):
    """Greedy streams of each kind; a third of the prompts of token ids fill their blocks."""
    rnd = random.Random(seed)
    for number in range(count):
        body = {"model": "tiny", "temperature": 0, "stream": True, "stream_options": USAGE}
        body |= {"max_tokens": rnd.choice([2, 3, 16, 24]), "ignore_eos": rnd.random() < 0.5}
        words = " ".join(rnd.choice(WORDS) for _ in range(rnd.randrange(2, 200)))
        ids = [rnd.randrange(10, 500) for _ in range(rnd.choice([16, 128, 512, rnd.randrange(2, 600)]))]
        chat = {"messages": [{"role": "user", "content": words}]}
        yield body | [{"prompt": words}, {"prompt": ids}, chat][number % 3]


def told(streamed):
    return streamed.text, streamed.finish, streamed.stop, streamed.usage, streamed.ids, streamed.roles


@pytest.fixture(scope="module")
def router(start_router, engines):
    """1P1D, of which the router has an answer."""
    url = start_router("router-first", [engines.p0], [engines.d0], args=("--first-token-from", "prefill"))
    address = url.removeprefix("http://")
    for body in bodies(3, seed=1):
        read(address, body)
    return address


@pytest.mark.parametrize("count", [60, pytest.param(STREAMS, marks=pytest.mark.thorough)])
def test_streams_are_those_of_one_engine(router, engines, count):
    """Text, end and usage of each; D loads what P has computed."""
    all_bodies = list(bodies(count, seed=7))
    expected = [told(read(engines.reference.address, body)) for body in all_bodies]
    with Watch(engines.d0) as decode:
        found = [read(router, body) for body in all_bodies]

    wrong = [number for number, one in enumerate(found) if told(one) != expected[number]]
    assert wrong == []
    shown = [one for one in found if "decode;" not in one.timing]
    added = [one.first_ms - float(one.timing.rpartition("dur=")[2]) for one in shown]
    median = statistics.median(added)
    print(f"\n{len(shown)} of {count} first tokens are P's; its answer is at the client after {median:.2f} ms (median)")
    assert len(shown) >= count * 3 // 4  # some tokens are half a character, or may begin a tool call
    assert decode.delta(LOADS) == count
    wait_until(lambda: nothing_held(engines.p0) and nothing_held(engines.d0), seconds=5, what="nothing is held")


def test_the_first_token_does_not_wait_for_decode(router, engines):
    """D's server is frozen, and the client has P's token; the rest comes when D goes on."""
    body = next(body for body in bodies(20, seed=5) if "decode;" not in read(router, body).timing)
    expected = told(read(engines.reference.address, body))
    os.kill(engines.pids["d0"], signal.SIGSTOP)
    try:
        found = read(router, body, on_first=lambda: os.kill(engines.pids["d0"], signal.SIGCONT))
    finally:
        os.kill(engines.pids["d0"], signal.SIGCONT)

    assert told(found) == expected
    assert "decode;" not in found.timing
    wait_until(lambda: nothing_held(engines.p0) and nothing_held(engines.d0), seconds=5, what="nothing is held")


@pytest.mark.parametrize("min_tokens", [0, 1])
def test_an_answer_may_end_with_its_first_token(router, engines, min_tokens):
    """P's answer is all of it, and its blocks are free at once; with ``min_tokens`` it must not end so."""
    for body in bodies(6, seed=11):
        first = {**body, "max_tokens": 1, "stream_options": USAGE, "return_token_ids": True}
        stops = first_ids(engines.reference.address, first)
        ending = {**body, "stop_token_ids": stops, "min_tokens": min_tokens}
        assert told(read(router, ending)) == told(read(engines.reference.address, ending))
    wait_until(lambda: nothing_held(engines.p0) and nothing_held(engines.d0), seconds=5, what="nothing is held")


def first_ids(address, body):
    """Return the token that an answer begins with."""
    connection, answer = asked(address, body)
    lines = answer.read().decode().splitlines()
    connection.close()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return next(choice["token_ids"] for chunk in chunks for choice in chunk["choices"] if choice.get("token_ids"))
