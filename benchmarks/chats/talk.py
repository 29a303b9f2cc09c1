"""Chats of several turns: what is said, what one engine answers, and many of them held at once
through routers.
"""

import asyncio
import itertools
import json
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from support.words import one_token_words

FIRST, LATER = 260, 60  # words of the first question and of later ones; a word is a token
ANSWER = 24  # tokens
TEXT_S = 120.0  # the most that one answer may take
REFERENCE_AT_ONCE = 16


@dataclass
class Chat:
    """What a client says, and what a single engine answers; ``prompts``: the token ids of each
    turn's prompt.
    """

    number: int
    questions: list
    answers: list = field(default_factory=list)
    prompts: list = field(default_factory=list)

    @property
    def tokens(self):
        """Return how long the conversation is at its end."""
        return len(self.prompts[-1]) + ANSWER

    def messages(self, turn):
        """Return the messages of a turn's prompt."""
        said = itertools.zip_longest(self.questions[: turn + 1], self.answers[:turn])
        pairs = [[("user", question), ("assistant", answer)] for question, answer in said]
        return [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in pair
            if text is not None
        ]


@dataclass
class Turn:
    """One answer that a client got through a router. Times are seconds."""

    side: str  # the router's configuration
    chat: int
    turn: int
    first: float | None = None  # until the first text
    gaps: list = field(default_factory=list, repr=False)  # between events with text
    is_right: bool = False
    is_alone: bool = False  # a decode engine served it alone
    failure: str = ""  # empty: none
    tokens: int = 0  # of the prompt
    # of these, what the engine that computed the prompt did not compute, by its own answer
    cached: int = 0
    most: int = 0  # the most that any engine had cached when the request was sent


class Words:
    """Words that are a token each, whatever stands beside them: a text of them has the same tokens
    in the next turn.
    """

    def __init__(self, model):
        self.texts = one_token_words(model)

    def chats(self, count, turns, *, seed):
        """Return chats that nobody has answered yet."""
        dice = random.Random(seed)
        words = list(self.texts.values())
        lengths = [FIRST] + [LATER] * (turns - 1)
        return [
            Chat(n, ["".join(dice.choices(words, k=length)) for length in lengths])
            for n in range(count)
        ]

    def body(self, **more):
        """Return a request whose answer consists of such words."""
        return {
            "model": "tiny",
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": list(self.texts),
            **more,
        }


def client_of(**options):
    """Return a client; vLLM closes connections that are idle for 5 s, and this one does so
    before.
    """
    limits = httpx.Limits(max_connections=None, keepalive_expiry=4)
    return httpx.AsyncClient(trust_env=False, timeout=TEXT_S, limits=limits, **options)


async def answer_alone(url, words, chats):
    """Have a single engine answer all chats: what it says is right."""
    places = asyncio.Semaphore(REFERENCE_AT_ONCE)

    async def hold(client, chat):
        for turn in range(len(chat.questions)):
            body = words.body(messages=chat.messages(turn), return_token_ids=True)
            async with places:
                reply = await client.post(f"{url}/v1/chat/completions", json=body)
            found = reply.raise_for_status().json()
            chat.prompts.append(found["prompt_token_ids"])
            chat.answers.append(found["choices"][0]["message"]["content"])

    async with client_of() as client, asyncio.TaskGroup() as group:
        for chat in chats:
            group.create_task(hold(client, chat))


class Batch:
    """Chats that are held through several routers at once; caches do not mix, because salts differ.

    ``sides``: name of a configuration -> URL of its router; to those in ``by_ids`` prompts go as
    token ids. At most ``at_once`` requests are under way, of at most ``open_most`` chats that have
    begun and go on.
    """

    def __init__(
        self, words, chats, sides, oracle, *, at_once, think_s, open_most, by_ids=(), seed=0
    ):
        self.turns = []
        self._words = words
        self._chats = chats
        self._sides = sides
        self._by_ids = by_ids
        self._oracle = oracle
        self._think_s = think_s  # on the mean, exponentially distributed
        self._dice = random.Random(seed)
        self._at_once = at_once
        self._places = asyncio.Semaphore(at_once)
        self._open = asyncio.Semaphore(open_most)
        self._run = f"{time.time_ns():x}"

    async def hold(self):
        """Hold all of them, and return every turn."""
        async with client_of() as client, asyncio.TaskGroup() as group:
            for chat, side in itertools.product(self._chats, self._sides):
                group.create_task(self._when_open(client, side, chat))
        return self.turns

    @property
    def count(self):
        """Return how many turns there will be."""
        return len(self._sides) * sum(len(chat.questions) for chat in self._chats)

    async def restart(self, name, engines, *, after, until):
        """Stop an engine when so many turns are over, and start it again while the chats go on
        without it.

        They wait for it when ``until`` turns are over, so that some follow. No request is under way
        when it is stopped. Return how many turns were over.
        """
        async with self._quiet(after):
            over = len(self.turns)
            await asyncio.to_thread(engines.stop, name)
        starting = asyncio.create_task(asyncio.to_thread(engines.start, name))
        async with self._quiet(until):
            await starting
            await self._oracle.knows(name)
        return over

    @asynccontextmanager
    async def _quiet(self, turns):
        """No request is under way during the block, which begins when so many turns are over."""
        while len(self.turns) < turns:
            await asyncio.sleep(0.02)
        for _ in range(self._at_once):
            await self._places.acquire()
        try:
            yield
        finally:
            for _ in range(self._at_once):
                self._places.release()

    async def _when_open(self, client, side, chat):
        async with self._open:
            await self._hold(client, side, chat)

    async def _hold(self, client, side, chat):
        # they do not all begin at once
        await asyncio.sleep(self._dice.uniform(0, 2 * self._think_s))
        for turn in range(len(chat.questions)):
            if turn:
                await asyncio.sleep(self._dice.expovariate(1 / self._think_s))
            async with self._places:
                seen = await self._ask(client, side, chat, turn)
            self.turns.append(seen)
            if not seen.is_right:
                return  # the prompts that follow would be others

    async def _ask(self, client, side, chat, turn):
        salt = f"{self._run}-{side}-{chat.number}"
        seen = Turn(side, chat.number, turn)
        options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
        if side in self._by_ids:
            path = "/v1/completions"
            prompt = {"prompt": chat.prompts[turn]}
        else:
            path = "/v1/chat/completions"
            prompt = {"messages": chat.messages(turn)}
        body = self._words.body(**prompt, **options)
        seen.most = max(self._oracle.cached(chat.prompts[turn], salt).values())
        try:
            async with asyncio.timeout(TEXT_S):
                text = await _stream(client, self._sides[side] + path, body, seen)
        except (httpx.HTTPError, TimeoutError, ValueError) as exc:
            seen.failure = f"{type(exc).__name__}: {exc}"
            return seen
        seen.is_right = (
            not seen.failure
            and text == chat.answers[turn]
            and seen.tokens == len(chat.prompts[turn])
        )
        return seen


async def _stream(client, url, body, seen):
    """Ask, note what happens when, and return the text."""
    start = time.perf_counter()
    lines = []
    text = ""
    times = []
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            seen.failure = (
                f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
            )
            return ""
        seen.is_alone = 'mode;desc="single"' in answer.headers.get("server-timing", "")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                lines.append((time.perf_counter(), line))
    for at, line in lines:
        event = json.loads(line[6:])
        if "error" in event:
            seen.failure = str(event["error"])[:300]
        new = "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            for choice in event.get("choices", ())
        )
        if new:
            times.append(at)
        text += new
        if usage := event.get("usage"):
            seen.tokens = usage["prompt_tokens"]
            seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if times:
        seen.first, seen.gaps = times[0] - start, [b - a for a, b in itertools.pairwise(times)]
    return text
