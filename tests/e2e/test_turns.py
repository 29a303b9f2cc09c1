"""Chats of several turns: text of a single engine, and hardly a token is computed twice."""

import json
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest

from support.cluster import Watch
from support.storm import salt
from support.words import one_token_words

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

COMPUTED, GENERATED = "vllm:prompt_tokens_by_source_total|local_compute", "vllm:generation_tokens_total"
STICKY = ("--prefill-policy", "prefix", "--decode-policy", "prefix", "--min-split-new-bytes", "1500")
FIRST, LATER, ANSWER = 420, 180, 160  # words: a token each; the first question is long enough to be split
TURNS = 5


@pytest.fixture(scope="module")
def words(model):
    """Words that are a token each, whatever stands beside them: a text of them has the same tokens in the next turn."""
    return one_token_words(model)


@dataclass
class Chats:
    """What chats over one router have shown."""

    url: str
    answers: list = field(default_factory=list)
    new: int = 0  # tokens of prompts and answers, each counted once
    computed: int = 0  # by all engines
    first_tokens: list = field(default_factory=list)  # seconds to the first token of each turn but the first
    alone: int = 0  # turns that a decode engine served alone

    def hold(self, words, seed, engines=()):
        """Hold a chat; ``engines``: those that may compute for it."""
        dice = random.Random(seed)
        said = salt()
        messages = []
        with ExitStack() as stack:
            watches = [stack.enter_context(Watch(engine)) for engine in engines]
            client = stack.enter_context(httpx.Client(trust_env=False, timeout=120))
            for turn in range(TURNS):
                text = "".join(dice.choices(list(words.values()), k=LATER if turn else FIRST))
                messages.append({"role": "user", "content": text})
                answer, seconds, tokens = self.turn(client, messages, words, said)
                self.answers.append(answer)
                messages.append({"role": "assistant", "content": answer})
                if turn:
                    self.first_tokens.append(seconds)
        self.new += tokens
        self.computed += sum(watch.delta(COMPUTED) + watch.delta(GENERATED) for watch in watches)

    def turn(self, client, messages, words, said):
        """Ask, and return the text, the seconds until it began, and the tokens of the conversation so far."""
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": ANSWER,
            "temperature": 0,
            "cache_salt": said,
            "stream": True,
            "stream_options": {"include_usage": True},
            "allowed_token_ids": list(words),
        }
        text = ""
        seconds = None
        tokens = 0
        start = time.perf_counter()
        with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            self.alone += "cached_prompt" in answer.headers.get("server-timing", "")
            for line in answer.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                seconds = seconds or (time.perf_counter() - start if text else None)
                if event.get("usage"):
                    tokens = event["usage"]["total_tokens"]
        return text, seconds, tokens

    def __str__(self):
        median = statistics.median(self.first_tokens) * 1000
        ratio = self.computed / self.new
        return f"{ratio:.3f} tokens computed for each new one, first token of later turns {median:.0f} ms (median)"


def is_thorough(test, params):
    """More chats, and two pairs, show the same, three times as long."""
    return params["chats"] == 6


@pytest.mark.parametrize(("pairs", "chats"), [(1, 2), (1, 6), (2, 6)])
def test_hardly_a_token_is_computed_twice(start_router, engines, words, pairs, chats):
    """Beside round robin, whose prefill engines compute the answers again; chat by chat in turn (1.048 was measured).

    ``-s`` shows how long first tokens took.
    """
    prefill, decode = [engines.p0, engines.p1][:pairs], [engines.d0, engines.d1][:pairs]
    plain = Chats(start_router(f"router-turns-plain-{pairs}", prefill, decode))
    sticky = Chats(start_router(f"router-turns-{pairs}", prefill, decode, args=STICKY))
    alone = Chats(engines.reference.base_url)
    for seed in range(chats):
        alone.hold(words, seed)
        plain.hold(words, seed, [*prefill, *decode])
        sticky.hold(words, seed, [*prefill, *decode])
    print(f"\n{pairs}P{pairs}D: round robin: {plain}; prefix: {sticky}")

    assert plain.answers == alone.answers
    assert sticky.answers == alone.answers
    assert sticky.alone == chats * (TURNS - 1)
    assert sticky.computed <= 1.05 * sticky.new
    assert plain.computed > 1.3 * plain.new
