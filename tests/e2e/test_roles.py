"""Roles that follow the traffic, on real engines: one turns because of what the router has measured at all of them.

``benchmarks/roles/bench.py`` has minutes of it, beside every static split.
"""

import asyncio
import random
import time
from collections import Counter

import httpx
import pytest

from pdrelay_tools.local.recipe import Connector
from support.cluster import engine_spec, nothing_held, start_engine, wait_until
from support.fixtures import ADMIN_KEY
from support.greedy_streams import Stream, follow, run
from support.pacing import paced
from support.router_orders import rows

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PACE = (0.04, 5e-4, 4e-3)  # seconds: of a step, of a prompt token, of a stream; support/pacing.py
ARGS = (
    "--roles", "auto", "--target-ttft", "2", "--target-itl", "0.08", "--roles-interval", "2",
    "--resume-streams", "true", "--health-check-interval", "0.5", "--stream-idle-timeout", "480",
)  # fmt: skip
PER_S, PROMPT, ANSWER = 1.8, (800, 1200), 24  # requests a second, tokens: more prompts than one P can compute
MOST_S = 120.0  # until the turn; 50 on an idle machine


@pytest.fixture
def engines(fleet, model):
    """Engines that can be P and D, each in its own time."""
    options = {"role": None, "connector": Connector.PDRELAY}
    args = ("--max-num-batched-tokens", "512", "--max-num-seqs", "32")
    specs = [paced(engine_spec(f"roles-{name}", model, extra_args=args, **options), *PACE) for name in "abc"]
    children = [start_engine(fleet, spec) for spec in specs]
    fleet.wait_ready(children, timeout_s=300)
    yield specs
    fleet.stop(*children)


def bodies():
    """Requests without an end, alike in each run."""
    dice = random.Random(1)
    while True:
        yield {
            "model": "tiny", "prompt": [dice.randrange(10, 500) for _ in range(dice.randrange(*PROMPT))],
            "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


def serving(url):
    """Return how many engines serve each role; those that turn serve none."""
    return Counter(row["role"] for row in rows(url).values() if row["turns_to"] is None)


def ask_until(url, is_over, most_s):
    """Ask at a steady rate until something is so; return all streams at their end."""
    streams = []
    asked = bodies()

    async def scene():
        end = time.monotonic() + most_s
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=180, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            while not await asyncio.to_thread(is_over) and time.monotonic() < end:
                streams.append(Stream(next(asked)))
                group.create_task(follow(client, url, streams[-1]))
                await asyncio.sleep(1 / PER_S)

    asyncio.run(scene())
    return streams


@pytest.mark.thorough  # the controller looks at the engines for 45 s before it decides
def test_an_engine_turns_by_measured_numbers(engines, start_router):
    """One P has more prompts than it computes, two D have little to do: one becomes P, and no request is lost."""
    url = start_router("router-roles", engines[:1], engines[1:], args=ARGS, env={"ADMIN_API_KEY": ADMIN_KEY})
    before = serving(url)
    began = time.monotonic()
    turned = []

    def is_over():
        if not turned and serving(url) == {"prefill": 2, "decode": 1}:
            turned.append(time.monotonic() - began)
        return bool(turned) and time.monotonic() > began + turned[0] + 8  # with the engine that has turned

    streams = ask_until(url, is_over, MOST_S)
    for spec in engines:
        wait_until(lambda spec=spec: nothing_held(spec), seconds=40, what=f"{spec.name} is idle")
    some = streams[:24] + streams[-8:]
    expected = run(engines[2].base_url, [stream.body for stream in some])
    verdicts = Counter(one.verdict(other) for one, other in zip(some, expected, strict=True))
    stats = httpx.get(f"{url}/stats", trust_env=False, timeout=30).json()
    (part,) = [part for part in stats["features"] if part["title"] == "Roles"]
    why, turns = part["sentences"]
    print(f"\n{len(streams)} requests; {before} turned after {turned} s ({turns}); now {why}")

    assert turned
    assert "to prefill" in turns
    assert all(stream.is_whole and not stream.error for stream in streams)
    assert verdicts == {"right": 32}
