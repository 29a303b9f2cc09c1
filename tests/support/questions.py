"""Seeded requests of every kind, asked with the official client, and answers that can be compared."""

import functools
import random
import ssl
from dataclasses import dataclass

import openai

WORDS = (
    *("river", "stone", "lantern", "north", "cloud", "window", "copper", "garden", "seven", "letter", "morning"),
    *("paper", "engine", "bridge", "silver", "valley", "winter", "candle", "harbor", "mirror", "quiet", "signal"),
)
TOKENS = 16  # generated per answer
# The last prompt token is computed alone by a decode engine and among others by a single one. In float32 those sums
# can differ in their order: seen in 1 of 113 answers, in the last digit. A wrong block moves logprobs by 0.01 or more.
ROUNDING = 1e-4


@dataclass(frozen=True)
class Question:
    """One request: its kind decides the API and whether it is streamed."""

    kind: str  # "text", "ids" or "chat"
    stream: bool
    prompt: object

    def __str__(self):
        size = len(self.prompt)
        return f"{self.kind}-{'stream' if self.stream else 'whole'}-{size}"


@dataclass(frozen=True)
class Answer:
    """What must be equal: the text, every token and its logprob, and the likeliest other tokens with theirs."""

    text: str
    tokens: tuple
    logprobs: tuple
    others: tuple
    prompt_tokens: int
    cached_tokens: int


def questions(count, *, seed, longest=1500):
    """Return ``count`` questions of 8 to ``longest`` tokens; every fifth shares most of its prompt with the last."""
    rnd = random.Random(seed)
    made, last_ids, last_words = [], [], []
    for number in range(count):
        length = min(longest, int(8 * (longest / 8) ** rnd.random()))
        ids = [rnd.randrange(10, 500) for _ in range(length)]
        words = [rnd.choice(WORDS) for _ in range(max(2, length // 4))]
        if number % 5 == 4:
            ids, words = (
                last_ids[: len(last_ids) * 2 // 3] + ids[:40],
                last_words[: len(last_words) * 2 // 3] + words[:9],
            )
        last_ids, last_words = ids, words
        kind = ("text", "ids", "chat")[number % 3]
        made.append(Question(kind, number % 2 == 1, tuple(ids) if kind == "ids" else " ".join(words)))
    return made


def client(url):
    """Return the official client for a router or an engine; close it, or use it in a ``with`` block."""
    http = openai.DefaultHttpxClient(verify=_certificates(), timeout=120)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120, http_client=http)


@functools.cache
def _certificates():
    """Nobody here asks for one, and every client would read them all: 30 ms."""
    return ssl.create_default_context()


def ask(api, question, *, tokens=TOKENS, **engine_fields):
    """Ask a question and return the answer; an engine, not a router, may be told more in ``engine_fields``."""
    common = {"model": "tiny", "temperature": 0, "seed": 0, "max_tokens": tokens, "stream": question.stream}
    common["extra_body"] = engine_fields
    if question.stream:
        common["stream_options"] = {"include_usage": True}
    if question.kind == "chat":
        messages = [{"role": "user", "content": question.prompt}]
        reply = api.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **common)
    else:
        prompt = list(question.prompt) if question.kind == "ids" else question.prompt
        reply = api.completions.create(prompt=prompt, logprobs=2, **common)
    parts = list(reply) if question.stream else [reply]
    return _chat(parts) if question.kind == "chat" else _completion(parts)


def _completion(parts):
    text, tokens, logprobs, others = "", [], [], []
    for choice in (part.choices[0] for part in parts if part.choices):
        text += choice.text
        if choice.logprobs:
            tokens += choice.logprobs.tokens
            logprobs += choice.logprobs.token_logprobs
            others += [tuple(sorted(top.items())) for top in choice.logprobs.top_logprobs]
    return _answer(text, tokens, logprobs, others, parts)


def _chat(parts):
    text, tokens, logprobs, others = "", [], [], []
    for choice in (part.choices[0] for part in parts if part.choices):
        text += (choice.delta if hasattr(choice, "delta") else choice.message).content or ""
        for item in choice.logprobs.content if choice.logprobs and choice.logprobs.content else ():
            tokens.append(item.token)
            logprobs.append(item.logprob)
            others.append(tuple((top.token, top.logprob) for top in item.top_logprobs))
    return _answer(text, tokens, logprobs, others, parts)


def _answer(text, tokens, logprobs, others, parts):
    usage = next(part.usage for part in reversed(parts) if part.usage)
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    assert len(tokens) == usage.completion_tokens, "every generated token has a logprob"
    return Answer(text, tuple(tokens), tuple(logprobs), tuple(others), usage.prompt_tokens, cached)


def compare(url, asked, reference_answer):
    """Ask every question through a router; return our answers, and what differs from the reference's."""
    with client(url) as api:
        answers = [ask(api, question) for question in asked]
    wrong = {
        str(question): found
        for question, answer in zip(asked, answers, strict=True)
        if (found := differences(answer, reference_answer(question)))
    }
    return answers, wrong


def differences(ours, reference):
    """Return the names of what differs between two answers; texts and tokens exactly, logprobs but for rounding."""
    found = [name for name in ("text", "tokens", "prompt_tokens") if getattr(ours, name) != getattr(reference, name)]
    return found + [
        name for name in ("logprobs", "others") if not _close(getattr(ours, name), getattr(reference, name))
    ]


def _close(ours, reference):
    if isinstance(ours, float) and isinstance(reference, float):
        return abs(ours - reference) <= ROUNDING
    if isinstance(ours, tuple) and isinstance(reference, tuple):
        return len(ours) == len(reference) and all(_close(a, b) for a, b in zip(ours, reference, strict=True))
    return ours == reference
