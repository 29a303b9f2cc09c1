"""Requests of the benchmark of roles: a half of long answers and a half of long prompts, and what
clients see.
"""

import asyncio
import random
import time
from dataclasses import dataclass

import httpx

from support.greedy_streams import Stream, follow


@dataclass(frozen=True)
class Half:
    """One kind of traffic; lengths are tokens, each between the two."""

    name: str
    per_s: float  # requests, at random times (Poisson)
    prompt: tuple
    answer: tuple


ANSWERS = Half("answers", 1.6, (60, 140), (60, 140))
PROMPTS = Half("prompts", 1.5, (1000, 2000), (10, 30))
HALVES = (ANSWERS, PROMPTS)


@dataclass(frozen=True)
class Asked:
    """A request, and when it comes: seconds from the start."""

    at: float
    half: Half
    body: dict


def trace_of(seconds, seed=1):
    """Return the requests of both halves, each of so many seconds; the same ones at every call."""
    dice = random.Random(seed)
    found = []
    for number, half in enumerate(HALVES):
        at = dice.expovariate(half.per_s)
        while at < seconds:
            found.append(Asked(number * seconds + at, half, _body(half, dice)))
            at += dice.expovariate(half.per_s)
    return found


def _body(half, dice):
    return {
        "model": "tiny",
        "prompt": [dice.randrange(10, 500) for _ in range(dice.randint(*half.prompt))],
        "max_tokens": dice.randint(*half.answer),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def client_of():
    return httpx.AsyncClient(
        trust_env=False, timeout=400, limits=httpx.Limits(max_connections=None)
    )


async def play(trace, urls):
    """Send each request when it comes, to one router after the other; return the streams at their
    end.
    """
    streams = [Stream(asked.body) for asked in trace]
    start = time.monotonic()
    async with client_of() as client, asyncio.TaskGroup() as group:
        for number, (asked, stream) in enumerate(zip(trace, streams, strict=True)):
            await asyncio.sleep(start + asked.at - time.monotonic())
            group.create_task(_follow(client, urls[number % len(urls)], stream))
    return streams


async def _follow(client, url, stream):
    """An answer that is no stream is what the client has got: an error."""
    try:
        await follow(client, url, stream)
    except AssertionError as exc:
        stream.error = str(exc)[:300] or "no stream"


async def play_alone(trace, url, at_once=24):
    """Have one engine answer everything as fast as it can: what it says is right."""
    streams = [Stream(asked.body) for asked in trace]
    places = asyncio.Semaphore(at_once)

    async def one(client, stream):
        async with places:
            await follow(client, url, stream)

    async with client_of() as client, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(one(client, stream))
    return streams
