"""Any body, good or bad, through the router and to one engine alone: the answers are the same, and nothing is held."""

import asyncio
import json
import math
import os
from collections import Counter
from random import Random

import httpx
import pytest

from pdrelay_proxy.core.model import Api
from support.bodies import draw
from support.cluster import Watch, base_url, nothing_held, router_command, wait_until
from support.proc import memory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

AT_ONCE = 20
ROUNDS = (10, 100)
PATIENCE = 20  # s; a client that waits for longer hangs up, which must not hurt either
GROWTH = 12 << 20  # bytes of the router, from the middle to the end: what it keeps for the largest bodies in flight
ENDED = 599  # in place of a status: the connection broke off
# Names and times of an answer, and what depends on whose cache has seen the prompt.
OWN = {
    "id", "request_id", "item_id", "created", "created_at", "completed_at", "system_fingerprint", "sequence_number",
    "prompt_tokens_details", "input_tokens_details", "input_tokens", "cache_read_input_tokens",
    "cache_creation_input_tokens",
}  # fmt: skip
PIECES = {"text", "content", "delta", "arguments", "partial_json"}  # texts that events continue
# What the router refuses or replaces, where an engine reads it: docs/router.md, "Request path".
ROUTERS = (b"_transfer_params", b"background", b"request_id")


@pytest.fixture(scope="module")
def router(fleet, engines):
    command = router_command("router-fuzz", [engines.p0], [engines.d0])
    child = fleet.start(command)
    fleet.wait_ready([child], timeout_s=30)
    yield child
    fleet.stop(child)


class Fuzz:
    """Sends batches of bodies to both, and remembers what came back."""

    def __init__(self, url, reference):
        self.url, self.reference = url, reference
        self.statuses = Counter()
        self.split = Counter()  # by path, and whether it was a stream

    async def send(self, batch):
        """Return the bodies whose answers differ, or that no client should get."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False, limits=limits) as http:
            found = await asyncio.gather(*(self._one(http, *one) for one in batch))
        return [one for one in found if one is not None]

    async def _one(self, http, path, raw):
        both = [answer(http, url + path, raw) for url in (self.url, self.reference)]
        answers = await asyncio.gather(*both, return_exceptions=True)  # none goes on behind the end of the batch
        if any(isinstance(one, httpx.ReadTimeout) for one in answers):
            self.statuses["hung up"] += 1
            return None
        (*ours, way), (*expected, _) = answers
        self.statuses[ours[0]] += 1
        if ours[0] == 200 and "prefill;" in way:
            self.split[path, isinstance(ours[1], list)] += 1
        return None if are_same(raw, ours, expected) else (path, raw[:2000], str(ours)[:800], str(expected)[:800])


async def answer(http, url, raw):
    """Return the status of an answer, what it says (a list of a stream), and which way the request has gone.

    An error at the beginning of a stream is a status, too.
    """
    try:
        reply = await http.post(url, content=raw, headers={"content-type": "application/json"})
    except httpx.ReadTimeout:
        raise
    except httpx.TransportError as error:
        return ENDED, repr(error), ""
    way = reply.headers.get("server-timing", "")
    kind = reply.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        return reply.status_code, reply.json() if kind.startswith("application/json") else reply.text, way
    lines = reply.text.splitlines()
    said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if error := said[0].get("error"):
        return error["code"], error["message"], way
    parts = {}
    for one in said:
        place = str((one.get("type"), one.get("index"), one.get("output_index")))
        parts[place] = folded(parts.get(place), one)
    return reply.status_code, [*map(list, parts.items()), lines.count("data: [DONE]")], way


def folded(one, other, name=None):
    """Put two pieces of a stream together: how many tokens share an event is chance."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: folded(one.get(name), other.get(name), name) for name in {**one, **other}}
    if isinstance(one, list) and isinstance(other, list):
        if name in ("choices", "tool_calls"):
            places = {part["index"]: part for part in one}
            for part in other:
                places[part["index"]] = folded(places.get(part["index"]), part)
            return [places[index] for index in sorted(places)]
        return one + other
    if isinstance(one, str) and isinstance(other, str) and name in PIECES:
        return one + other
    return one if other is None else other


def are_same(raw, ours, expected):
    """Tell whether two answers are, as far as chance has no part in them."""
    status, said = ours
    if status >= 400:
        is_ended = expected[0] == ENDED  # vLLM's way to refuse in a stream of /v1/responses
        is_refused = status // 100 == expected[0] // 100 or is_ended or any(name in raw for name in ROUTERS)
        return is_refused and "The router failed" not in str(said)
    if status != expected[0]:
        return any(name in raw for name in ROUTERS)
    try:
        body = json.loads(raw)
    except ValueError:
        return True
    asked = body.get("sampling_params") or body
    return asked.get("temperature") != 0 or are_equal(said, expected[1])


def are_equal(one, other):
    """Tell whether two values are, but for rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(are_equal(one.get(name), other.get(name)) for name in {*one, *other} - OWN)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=0.005)
    return one == other


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: 2,000 bodies in place of 200."""
    return params["rounds"] != ROUNDS[0]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_any_body_is_answered_as_by_one_engine(router, engines, rounds):
    """Of every API, whole and streamed, many over two legs; no 500 of the router's own, flat memory, nothing held."""
    fuzz = Fuzz(base_url(router.command), engines.reference.base_url)
    sizes = []  # bytes of the router after each batch

    random = Random(os.environ.get("PDRELAY_FUZZ_SEED", "bodies"))
    with Watch(engines.d0) as decode:
        for _ in range(rounds):
            assert asyncio.run(fuzz.send([draw(random) for _ in range(AT_ONCE)])) == []
            sizes.append(memory(router))
    print(f"\n{dict(fuzz.statuses)}, router {sizes[len(sizes) // 2] >> 20} to {sizes[-1] >> 20} MiB")

    assert fuzz.statuses.total() >= AT_ONCE * rounds
    assert fuzz.statuses[200] > AT_ONCE * rounds / 3
    assert set(fuzz.split) == {(api.value, streams) for api in Api for streams in (False, True)}
    assert decode.delta("vllm:pdrelay_loads_total") > fuzz.split.total() / 2  # the others were in its cache
    assert sizes[-1] - sizes[len(sizes) // 2] < GROWTH
    for spec in (engines.p0, engines.d0):
        wait_until(lambda spec=spec: nothing_held(spec), seconds=40, what=f"{spec.name} holds nothing")
