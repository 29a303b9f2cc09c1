"""Fits the engine of ``xpyd replay`` to a real one, and says how well it foretells a load that it was not fitted to.

One CPU engine with the tiny model of ``xpyd up``: prefill time by length, ITL by batch and context, least squares, and
then a mixed load whose TTFT and ITL are measured and simulated. Three minutes on an idle machine:

    python tests/benchmarks/replay/fit.py

writes .xpyd/bench/engine.json, for ``xpyd replay --engine``, and prints both sides of the mixed load.
"""

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.cluster import ROOT, engine_spec, start_engine
from xpyd_proxy.local.model import ensure_model
from xpyd_proxy.local.processes import open_fleet
from xpyd_proxy.planning.replay.engine import EngineModel, EventLoop, VirtualEngine, VirtualLeg

PROMPTS = (32, 128, 256, 512, 1024, 1536, 1950)  # tokens
BATCHES, CONTEXTS = (1, 4, 8, 16, 32), (64, 512, 1500)
BLOCK, BATCHED_TOKENS, KV_TOKENS = 32, 2048, 65_536
WORDS = (260, 512)  # tokens of the tiny model that are pieces of words
MIXED = 120  # requests of the load that nothing is fitted to
OUT = ROOT / ".xpyd/bench/engine.json"


class Client:
    """Streams completions of prompts that are lists of tokens."""

    def __init__(self, url):
        limits = httpx.Limits(max_connections=None, keepalive_expiry=4)  # vLLM closes idle ones after 5 s
        self._http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits)
        self._dice = random.Random(0)
        self.merged = 0  # tokens without an event of their own

    def prompt(self, tokens):
        return [self._dice.randrange(*WORDS) for _ in range(tokens)]

    async def ask(self, prompt, tokens):
        """Return when it was sent and when each token came."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        times = [time.monotonic()]
        async with self._http.stream("POST", "/v1/completions", json={**body, "temperature": 0}) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
        self.merged += tokens + 1 - len(times)  # vLLM puts tokens into one event if the last is not yet written
        return times


async def prefill_times(client):
    """Return (tokens, seconds): one prompt at a time, of which nothing is cached."""
    found = []
    for tokens in PROMPTS * 5:
        sent, first = await client.ask(client.prompt(tokens), 1)
        found.append((tokens, first - sent))
    return [(size, statistics.median(s for tokens, s in found if tokens == size)) for size in PROMPTS]


async def decode_times(client):
    """Return (batch, tokens before, seconds): the median ITL while all of a batch are decoded."""
    found = []
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        answers = await asyncio.gather(*(client.ask(client.prompt(context), 48) for _ in range(batch)))
        begin, end = max(times[1] for times in answers), min(times[-1] for times in answers)
        gaps = [b - a for times in answers for a, b in itertools.pairwise(times[1:]) if begin <= a and b <= end]
        if gaps:  # none, if the first has ended before the last has begun
            found.append((batch, context + 24, statistics.median(gaps)))
    return found


def fitted(prefills, decodes):
    """Return the engine with the least squares of relative errors, and its largest relative error in each fit."""
    rows = [[1, batch, batch * context] for batch, context, _ in decodes]
    (step, request, context), decode_error = _least_squares(rows, [seconds for *_, seconds in decodes])
    rows = [[1, tokens, tokens**2 / 2] for tokens, _ in prefills]
    (base, token, before), prefill_error = _least_squares(rows, [seconds for _, seconds in prefills])
    model = EngineModel(
        step_s=step, prefill_token_s=token, prefill_context_s=before,
        decode_request_s=request, decode_context_s=context, leg_s=max(0.0, base - step),
        max_num_batched_tokens=BATCHED_TOKENS, max_num_seqs=256, kv_tokens=KV_TOKENS,
    )  # fmt: skip
    return model, prefill_error, decode_error


def _least_squares(rows, seconds):
    """Return factors of at least 0."""
    rows, seconds = np.array(rows, float), np.array(seconds)
    kept = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
        if min(found) >= 0:
            break
        del kept[int(np.argmin(found))]
    factors = np.zeros(rows.shape[1])
    factors[kept] = found
    return map(float, factors), float(max(abs(rows @ factors / seconds - 1)))


def mixed_load(model):
    """Return (at, tokens of the prompt, of them shared with all others, of the answer): some 40 % of full load."""
    dice = random.Random(1)
    sizes = [(dice.randrange(64, 1500), dice.choice((0, 0, 512)), dice.randrange(8, 96)) for _ in range(MIXED)]
    work = statistics.mean(model.chunk_s(prompt, 0) + answer * model.batch_s(1, prompt) for prompt, _, answer in sizes)
    at, load = 0.0, []
    for prompt, shared, answer in sizes:
        at += dice.expovariate(0.4 / (work + model.step_s * 8))
        load.append((at, prompt + shared, shared, answer))
    return load


async def measured(client, load):
    shared, begin = client.prompt(512), time.monotonic() + 0.5

    async def one(at, tokens, same, answer):
        prompt = shared[:same] + client.prompt(tokens - same)
        await asyncio.sleep(begin + at - time.monotonic())
        return await client.ask(prompt, answer)

    answers = await asyncio.gather(*(one(*request) for request in load))
    return (
        [times[1] - times[0] for times in answers],
        [b - a for times in answers for a, b in itertools.pairwise(times[1:])],
    )


def simulated(model, load):
    loop, names = EventLoop(), itertools.count(1000)
    engine, ttft = VirtualEngine(model, BLOCK, loop), {}
    for number, (at, tokens, same, answer) in enumerate(load):
        own = [next(names) for _ in range((tokens - same) // BLOCK)]
        leg = VirtualLeg([*range(same // BLOCK), *own][: tokens // BLOCK], tokens, answer)
        leg.first = lambda number=number, at=at: ttft.update({number: loop.now - at})
        loop.after(at + model.leg_s, partial(engine.add, leg))
    loop.run()
    return list(ttft.values()), [gap for gap, weight in engine.log.gaps for _ in range(weight)]


def main():
    model_dir = ROOT / ".xpyd/models/tiny"
    ensure_model(model_dir)
    spec = engine_spec(
        "replay-fit", model_dir, max_model_len=2048, block_size=BLOCK,
        extra_args=("--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", "256"),
    )  # fmt: skip
    with open_fleet(ROOT / ".xpyd/logs/bench") as fleet:
        fleet.wait_ready([start_engine(fleet, spec)], timeout_s=300)
        asyncio.run(_fit(spec.base_url))


async def _fit(url):
    client = Client(url)
    for size in (100, 1000):  # what is slow only once
        await asyncio.gather(*(client.ask(client.prompt(size), 8) for _ in range(4)))
    prefills, decodes = await prefill_times(client), await decode_times(client)
    model, prefill_error, decode_error = fitted(prefills, decodes)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
    for name, rows in (("prefill: tokens, s", prefills), ("decode: batch, context, s", decodes)):
        print(name, json.dumps([[round(value, 5) for value in row] for row in rows]))
    print(f"largest error of the fits: prefill {prefill_error:.0%}, decode {decode_error:.0%}")
    print(OUT.read_text())
    load = mixed_load(model)
    sides = await measured(client, load), simulated(model, load)
    print(f"{len(load)} requests in {load[-1][0]:.0f} s; {client.merged} tokens came together with another one")
    for name, index, share in (
        ("TTFT p50", 0, 0.5), ("TTFT p95", 0, 0.95), ("TTFT mean", 0, None),
        ("ITL p50", 1, 0.5), ("ITL p99", 1, 0.99), ("ITL mean", 1, None),
    ):  # fmt: skip
        real, made = (np.mean(side[index]) if share is None else np.quantile(side[index], share) for side in sides)
        print(f"{name:10} measured {real * 1e3:7.1f} ms, simulated {made * 1e3:7.1f} ms, {made / real - 1:+.0%}")


if __name__ == "__main__":
    main()
