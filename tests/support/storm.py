"""Many requests at the same time, and what became of each: right, an honest error, or something that must not be."""

import asyncio
import itertools
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, replace

from support.legs import prompt_of

HEAD = (
    "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Connection: close\r\nContent-Length: {size}\r\n\r\n"
)
HONEST = (502, 503, 504)  # the engine broke off, nobody can serve now, out of time; a 500 would be a bug of the router
PATHS = ("/v1/completions", "/v1/chat/completions")
WORDS = ("river", "stone", "lantern", "north", "cloud", "window", "copper", "garden", "seven", "letter", "paper")
_salts = itertools.count(1)


@dataclass(frozen=True)
class Drop:
    """One request of a storm."""

    number: int
    tokens: int = 12
    length: int = 120  # of the prompt, in tokens or words
    chat: bool = False
    stream: bool = False

    @property
    def path(self):
        return PATHS[self.chat]

    def body(self, **more):
        head = {"model": "tiny", "temperature": 0, "seed": 0, "max_tokens": self.tokens, "ignore_eos": True}
        head |= {"stream": self.stream} | more
        if self.chat:
            words = " ".join(WORDS[id % len(WORDS)] for id in prompt_of(self.number, self.length))
            return head | {"messages": [{"role": "user", "content": words}]}
        return head | {"prompt": prompt_of(self.number, self.length)}


@dataclass(frozen=True)
class Fate:
    """What a client saw of one request."""

    drop: Drop
    status: int  # 0: the connection ended without a head
    text: str  # of all choices' first
    error: str  # the message of an error answer, or of an error event; empty: none
    is_complete: bool  # framed to its end, and a stream with [DONE]
    seconds: float
    raw: bytes = b""

    @property
    def name(self):
        """What the engine calls the request; its logs and the router's do, too."""
        return next(iter(re.findall(rb'"id":"([^"]+)"', self.raw)), b"").decode()

    def verdict(self, expected):
        """Return "right", "honest" or what is wrong."""
        if self.status == 200 and self.is_complete and not self.error:
            return "right" if self.text == expected else f"WRONG TEXT: {self.text!r} and not {expected!r}"
        if self.status in HONEST and self.error and self.is_complete:
            return "honest"
        if self.status == 200 and self.drop.stream and self.error:
            return "honest" if expected.startswith(self.text) else f"WRONG BEGINNING: {self.text!r} of {expected!r}"
        return f"DISHONEST: {self.status} {self.error!r} {self.raw[-300:]!r}"


def storm(count, *, seed=0, tokens=(4, 8, 12, 24), lengths=(20, 60, 120, 220)):
    """Return requests of every kind: completions and chat, streamed and not, short and long."""
    return [
        Drop(seed + n, tokens[n // 4 % len(tokens)], lengths[n // 3 % len(lengths)], chat=n % 4 > 1, stream=n % 2 == 1)
        for n in range(count)
    ]


def salt():
    """Return a salt that no engine's prefix cache knows: the same text must be computed and moved again."""
    return f"storm-{next(_salts)}-{time.monotonic_ns()}"


def fates(address, drops, *, at_once=24, seconds=60.0, **more):
    """Ask all of them and return what became of each; one that is not answered within ``seconds`` is a TimeoutError."""
    return asyncio.run(_all(address, drops, at_once, seconds, more))


def texts(address, drops):
    """Return the right texts, of an engine that needs nobody: by drop."""
    asked = sorted({replace(drop, stream=False) for drop in drops}, key=lambda drop: drop.number)
    found = fates(address, asked, at_once=16, seconds=120)
    assert {fate.status for fate in found} == {200}, [fate for fate in found if fate.status != 200][:3]
    return {fate.drop: fate.text for fate in found}


def judge(found, expected):
    """Count the verdicts; all others than "right" and "honest" are listed, with their requests."""
    verdicts = [(fate.verdict(expected[replace(fate.drop, stream=False)]), fate) for fate in found]
    bad = [(verdict, fate.drop, fate.name) for verdict, fate in verdicts if verdict not in ("right", "honest")]
    return Counter(verdict for verdict, _ in verdicts if verdict in ("right", "honest")), bad


async def _all(address, drops, at_once, seconds, more):
    places = asyncio.Semaphore(at_once)

    async def one(drop):
        async with places, asyncio.timeout(seconds):
            return await _ask(address, drop, more)

    return await asyncio.gather(*map(one, drops))


async def _ask(address, drop, more):
    raw = json.dumps(drop.body(**more)).encode()
    start = time.monotonic()
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    writer.write(HEAD.format(path=drop.path, size=len(raw)).encode() + raw)
    received = bytearray()
    try:
        while part := await reader.read(65536):
            received += part
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return _fate(drop, bytes(received), time.monotonic() - start)


def _fate(drop, received, seconds):
    head, _, rest = received.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    status = int(lines[0].split()[1]) if received.startswith(b"HTTP/1.1 ") else 0
    body, is_framed = _body(lines, rest)
    if status == 200 and drop.stream:
        text, error, is_done = _events(body)
        return Fate(drop, status, text, error, is_framed and is_done, seconds, received)
    data = json.loads(body) if is_framed and body else {}
    error = data.get("error", {}).get("message", "") if isinstance(data, dict) else ""
    text = _text(data["choices"][0]) if "choices" in data else ""
    if "choices" in data and data["choices"][0]["finish_reason"] == "error":
        error = "finish_reason error"
    return Fate(drop, status, text, error, is_framed, seconds, received)


def _body(lines, rest):
    """Undo the framing: (body, whether it is whole)."""
    if b"transfer-encoding: chunked" not in lines:
        size = next((int(line[16:]) for line in lines if line.startswith(b"content-length: ")), -1)
        return rest, len(rest) == size
    body = b""
    while True:
        size, sep, rest = rest.partition(b"\r\n")
        if not sep or not size:
            return body, False
        length = int(size, 16)
        if length == 0:
            return body, rest == b"\r\n"
        if len(rest) < length + 2:
            return body + rest[:length], False
        body += rest[:length]
        rest = rest[length + 2 :]


def _events(body):
    text, error = "", ""
    events = [line[6:] for line in body.decode(errors="replace").split("\n") if line.startswith("data: ")]
    for event in (json.loads(event) for event in events if event.strip() != "[DONE]"):
        if "error" in event:
            error = event["error"]["message"]
        elif event.get("choices"):
            text += _text(event["choices"][0])
    return text, error, events[-1:] == ["[DONE]"]


def _text(choice):
    if "text" in choice:
        return choice["text"]
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""
