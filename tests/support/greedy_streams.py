"""Greedy streams of a router, as their clients see them, beside those of a single engine."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx

from support.questions import WORDS


@dataclass
class Stream:
    """One stream, as its client sees it."""

    body: dict
    text: str = ""
    tokens: int = 0  # events with a text
    usage: dict = field(default_factory=dict)
    finish: str = ""
    error: str = ""
    is_broken: bool = False  # the router's connection was
    ids: set = field(default_factory=set)
    is_whole: bool = False
    longest_s: float = 0.0  # between two events
    first_s: float = 0.0  # from the request to its first text
    last_s: float = 0.0  # from the request to its last text

    @property
    def itl_s(self):
        """Return the mean time between two tokens."""
        return (self.last_s - self.first_s) / max(1, self.usage.get("completion_tokens", 0) - 1)

    def verdict(self, expected):
        """Return right, honest (an error behind a right beginning), broken (its connection was), or what is wrong."""
        if self.is_broken and expected.text.startswith(self.text):
            return "broken"
        if self.error and expected.text.startswith(self.text):
            return "honest"
        same = (self.text, self.usage, self.finish) == (expected.text, expected.usage, expected.finish)
        if self.is_whole and same and len(self.ids) == 1:
            return "right"
        return f"WRONG: {self.text!r} {self.usage} {self.finish} {self.ids} and not {expected.text!r} {expected.usage}"


def bodies(count, tokens, *, seed, salt):
    """Greedy streams, of completions and chats."""
    dice = random.Random(seed)
    for number in range(count):
        said = {"prompt": [dice.randrange(10, 500) for _ in range(dice.randrange(20, 200))]}
        if number % 2:
            said = {"messages": [{"role": "user", "content": " ".join(dice.choices(WORDS, k=dice.randrange(5, 60)))}]}
        yield said | {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }


async def follow(client, url, stream):
    """Read a stream to its end, or to that of its connection."""
    try:
        await _follow(client, url, stream)
    except httpx.TransportError:
        stream.is_broken = True


async def _follow(client, url, stream):
    path = "/v1/chat/completions" if "messages" in stream.body else "/v1/completions"
    began = time.monotonic()
    async with client.stream("POST", f"{url}{path}", json=stream.body) as response:
        assert response.status_code == 200, await response.aread()
        at = time.monotonic()
        async for line in _lines(response):
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            stream.longest_s = max(stream.longest_s, now - at)
            at = now
            if line == "data: [DONE]":
                stream.is_whole = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                stream.error = chunk["error"]["message"]
                continue
            stream.ids.add(chunk["id"])
            for choice in chunk["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                stream.text += text
                stream.tokens += bool(text)
                if text:
                    stream.first_s = stream.first_s or now - began
                    stream.last_s = now - began
                stream.finish = choice["finish_reason"] or stream.finish
            if chunk.get("usage"):
                names = ("prompt_tokens", "completion_tokens", "total_tokens")
                stream.usage = {name: chunk["usage"][name] for name in names}


async def _lines(response):
    """Yield the lines of a stream; httpx ends lines at characters that a text may have, such as U+0085, too."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


def run(url, asked, act=None, *, behind=0):
    """Run all streams at the same time; do something in a thread when each has so many tokens, or has ended."""
    return run_at([(url, body) for body in asked], act, behind=behind)


def run_at(asked, act=None, *, behind=0):
    """Run streams of several routers."""
    urls, streams = [url for url, _ in asked], [Stream(body) for _, body in asked]

    async def scene():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=180, limits=limits) as client:
            tasks = [
                asyncio.create_task(follow(client, url, stream)) for url, stream in zip(urls, streams, strict=True)
            ]
            if act is not None:
                # One that ends before has failed: its verdict says how.
                while any(one.tokens < behind and not task.done() for one, task in zip(streams, tasks, strict=True)):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(act)
            await asyncio.gather(*tasks)

    asyncio.run(scene())
    return streams
