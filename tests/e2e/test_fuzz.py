"""Bodies that nobody should send, to a router before real engines: all of them live, and say what is wrong."""

import asyncio
import json
import os
from collections import Counter

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.bodies import bodies
from support.cluster import base_url, nothing_held, router_command, wait_until
from support.proc import memory
from support.questions import Question, Shape, ask, client, differences

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

AT_ONCE = 20
ROUNDS = (10, 100)
PATIENCE = 20  # s; a client that waits for longer hangs up, which must not hurt either
GROWTH = 12 << 20  # bytes of the router, from the middle to the end: what it keeps for the largest bodies in flight


@pytest.fixture(scope="module")
def router(fleet, engines):
    command = router_command("router-fuzz", [engines.p0], [engines.d0])
    child = fleet.start(command)
    fleet.wait_ready([child], timeout_s=30)
    yield child
    fleet.stop(child)


class Fuzz:
    """Sends batches of bodies and remembers what came back."""

    def __init__(self, router):
        self.url = base_url(router.command)
        self.statuses = Counter()
        self.sizes = []  # bytes of the router after each batch
        self._router = router

    async def send(self, batch):
        """Return the bodies with an answer that no client should get."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, trust_env=False, limits=limits) as http:
            wrong = await asyncio.gather(*(self._one(http, *one) for one in batch))
        self.sizes.append(memory(self._router))
        return [one for one in wrong if one is not None]

    async def _one(self, http, path, raw):
        headers = {"content-type": "application/json"}
        try:
            reply = await http.post(path, content=raw, headers=headers)
        except httpx.ReadTimeout:
            self.statuses["hung up"] += 1
            return None
        self.statuses[reply.status_code] += 1
        return None if is_fine(reply) else (path, raw[:2000], reply.status_code, reply.text[:500])


def is_fine(reply):
    """An answer, or an error in OpenAI's or vLLM's shape that is not the router's own 500."""
    if reply.status_code == 200:
        return True
    if "The router failed" in reply.text:
        return False
    error = json.loads(reply.text).get("error")
    return bool(error) and len(error["message"] if isinstance(error, dict) else error) > 5


def is_thorough(test, params):
    """Tell what is only for ``make test-thorough``: 2,000 bodies in place of 200."""
    return params["rounds"] != ROUNDS[0]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_hundreds_of_bodies(router, engines, reference_answer, rounds):
    """No 500 of the router's own, flat memory; then both engines hold nothing and answer an ordinary question right."""
    fuzz = Fuzz(router)

    @settings(
        max_examples=rounds,
        derandomize="PDRELAY_FUZZ_SEED" not in os.environ,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.lists(bodies(), min_size=AT_ONCE, max_size=AT_ONCE))
    def send(batch):
        assert asyncio.run(fuzz.send(batch)) == []
        for spec in (engines.p0, engines.d0):
            assert httpx.get(f"{spec.base_url}/health", trust_env=False, timeout=30).status_code == 200

    send()
    print(f"\n{dict(fuzz.statuses)}, router {fuzz.sizes[len(fuzz.sizes) // 2] >> 20} to {fuzz.sizes[-1] >> 20} MiB")

    assert fuzz.statuses.total() >= AT_ONCE * rounds
    assert fuzz.statuses[200] > rounds
    assert fuzz.sizes[-1] - fuzz.sizes[len(fuzz.sizes) // 2] < GROWTH
    for spec in (engines.p0, engines.d0):
        wait_until(lambda spec=spec: nothing_held(spec), seconds=40, what=f"{spec.name} holds nothing")
    question = Question(Shape.TEXT, stream=True, prompt="copper garden seven letter " * 20)
    with client(fuzz.url) as api:
        assert differences(ask(api, question), reference_answer(question)) == []
