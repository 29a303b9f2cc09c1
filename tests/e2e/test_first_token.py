"""The prefill engine's token shown at once, on real engines: the streams of one engine, and when the first byte comes.

What is measured is printed (``pytest -s``); ``make bench-first-token`` measures it beside P's own answers.
"""

import json
import os
import signal
import statistics

import pytest

from support.cluster import SOON, Watch, nothing_held, wait_until
from support.first_tokens import USAGE, added_ms, asked, bodies, read, told

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STREAMS = 200
LOADS = "vllm:pdrelay_loads_total"


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
    added = [each for one in found if (each := added_ms(one)) is not None]
    median = statistics.median(added)
    print(f"\n{len(added)} of {count} first tokens are P's; its answer is at the client after {median:.2f} ms (median)")
    assert len(added) >= count * 3 // 4  # some tokens are half a character, or may begin a tool call
    assert decode.delta(LOADS) == count
    wait_until(lambda: nothing_held(engines.p0) and nothing_held(engines.d0), seconds=SOON, what="nothing is held")


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
    wait_until(lambda: nothing_held(engines.p0) and nothing_held(engines.d0), seconds=SOON, what="nothing is held")


@pytest.mark.parametrize("min_tokens", [0, 1])
def test_an_answer_may_end_with_its_first_token(router, engines, min_tokens):
    """P's answer is all of it, and its blocks are free at once; with ``min_tokens`` it must not end so."""
    for body in bodies(6, seed=11):
        first = {**body, "max_tokens": 1, "stream_options": USAGE, "return_token_ids": True}
        stops = first_ids(engines.reference.address, first)
        ending = {**body, "stop_token_ids": stops, "min_tokens": min_tokens}
        assert told(read(router, ending)) == told(read(engines.reference.address, ending))
    wait_until(lambda: nothing_held(engines.p0) and nothing_held(engines.d0), seconds=SOON, what="nothing is held")


def first_ids(address, body):
    """Return the token that an answer begins with."""
    connection, answer = asked(address, body)
    lines = answer.read().decode().splitlines()
    connection.close()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return next(choice["token_ids"] for chunk in chunks for choice in chunk["choices"] if choice.get("token_ids"))
