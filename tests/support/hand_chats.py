"""Chats of token ids over two legs by hand, in which P may ask D for the KV of earlier answers."""

import json
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx

from support.cluster import Watch

FIRST, LATER, ANSWER, TURNS = 300, 70, 90, 5  # tokens
COMPUTED, LOADED = (f"vllm:prompt_tokens_by_source_total|{name}" for name in ("local_compute", "external_kv_transfer"))
LENDS = {"do_remote_decode": True, "do_remote_prefill": False}


def engine_id(spec):
    """Return the id by which other engines know one, as its metrics say."""
    text = httpx.get(f"{spec.base_url}/metrics", trust_env=False, timeout=10).text
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:pdrelay_connector_info{"))
    return line.split('engine_id="')[1].split('"')[0]


@dataclass
class Chat:
    """A chat of token ids over two legs by hand: each turn goes over the prefill engine."""

    p: object
    d: object
    seed: int
    salt: str = "one"
    tokens: list = field(default_factory=list)

    def __post_init__(self):
        self.dice = random.Random(self.seed)

    def turn(self, *, stream=False, asks=True, cached_on=None):
        """Ask for the next answer, and return its tokens and what P has computed for it."""
        self.say()
        with Watch(self.p) as watch, Watch(self.d) as decode:
            params = self.prefill(cached_on or engine_id(self.d) if asks else None)
            answer = self.answer(params, stream=stream)
        return answer, SimpleNamespace(
            computed=watch.delta(COMPUTED), loaded=watch.delta(LOADED), handed_over=decode.delta(LOADED)
        )

    def say(self):
        """Add what the user says next."""
        self.tokens += [self.dice.randrange(10, 500) for _ in range(LATER if self.tokens else FIRST)]

    def prefill(self, cached_on=None):
        """Have P compute the prompt, which may ask an engine for what is cached there; return the params for D."""
        lent = LENDS if cached_on is None else {**LENDS, "pdrelay_cached_on": cached_on}
        asked = {"prompt": self.tokens, "cache_salt": self.salt, "max_tokens": 1, "min_tokens": 1}
        return post(self.p, {**asked, "kv_transfer_params": lent}).json()["kv_transfer_params"]

    def answer(self, params, *, stream=False):
        """Have D answer, and add the answer."""
        asked = {"prompt": self.tokens, "cache_salt": self.salt, "kv_transfer_params": params}
        answer = generate(self.d, asked, stream=stream)
        self.tokens += answer
        return answer


def alone(spec, seed, turns=TURNS):
    """Return the answers of one engine that does everything."""
    dice = random.Random(seed)
    tokens = []
    answers = []
    for _ in range(turns):
        tokens += [dice.randrange(10, 500) for _ in range(LATER if tokens else FIRST)]
        answers.append(generate(spec, {"prompt": tokens, "cache_salt": f"alone-{seed}"}))
        tokens += answers[-1]
    return answers


def generate(spec, body, *, stream=False):
    """Return the tokens of an answer, streamed or not."""
    body = {**body, "max_tokens": ANSWER, "ignore_eos": True, "return_token_ids": True, "stream": stream}
    response = post(spec, body)
    if not stream:
        return response.json()["choices"][0]["token_ids"]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]


def post(spec, body):
    """Ask an engine for a completion that must succeed."""
    body = {"model": "tiny", "temperature": 0, **body}
    response = httpx.post(f"{spec.base_url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert response.status_code == 200, response.text
    return response
