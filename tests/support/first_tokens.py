"""Streams of a router that shows the prefill engine's token: what they say, and when they begin."""

import http.client
import json
import random
import time
from dataclasses import dataclass

from support.questions import WORDS

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
    """Return what must be equal."""
    return streamed.text, streamed.finish, streamed.stop, streamed.usage, streamed.ids, streamed.roles


def added_ms(streamed):
    """Return how long after the prefill engine's answer its token was at the client; None: it is not that token."""
    if "decode;" in streamed.timing:
        return None
    return streamed.first_ms - float(streamed.timing.rpartition("dur=")[2])
