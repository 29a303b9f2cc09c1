"""Fits the engine of ``pdrelay replay`` to a real one, and says how well it foretells loads that it
was not fitted to.

One CPU engine with the tiny model of ``pdrelay up``. First guess: prefill time by length and by
what is cached before it, ITL by batch and context, each by itself, least squares. What shows under
load alone (the API server's work, what a step costs for each prompt, how much steps of a size
differ) is found by simulating loads that were measured, with other seeds and sizes than those that
judge the fit. Below four minutes on an idle machine:

    python -m benchmarks.replay.fit

writes .pdrelay/bench/engine.json, for ``pdrelay replay --engine``, and .pdrelay/bench/fit.md, a
part of docs/replay.md.
"""

import asyncio
import itertools
import json
import random
import statistics
import time
from functools import partial

import httpx
import msgspec
import numpy as np

from benchmarks.page import end_as_by_ctrl_c
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.engine import EventLoop, VirtualEngine, VirtualLeg
from support.cluster import ROOT, engine_spec, start_engine

# tokens: new, and cached before
PROMPTS = ((32, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (1536, 0), (1950, 0))
HITS = ((32, 512), (256, 512), (32, 1536), (256, 1536))
BATCHES, CONTEXTS = (1, 4, 8, 16, 32), (64, 512, 1500)
BLOCK = 32
BATCHED_TOKENS = 2048
KV_TOKENS = 65_536
WORDS = (260, 512)  # tokens of the tiny model that are pieces of words
MIXED = 120  # requests of the load that nothing is fitted to
OUT, PAGE = ROOT / ".pdrelay/bench/engine.json", ROOT / ".pdrelay/bench/fit.md"
TRIES = 500  # changes that are tried
# What is searched for, and where it begins if the first guess has nothing of it.
SEARCHED = {
    "jitter": 0.1, "prefill_request_s": 1e-3, "api_request_s": 1e-3, "api_token_s": 1e-4, "api_prompt_token_s": 1e-6,
    "step_s": 1e-3, "prefill_token_s": 1e-5, "decode_request_s": 1e-5, "decode_context_s": 1e-9, "leg_s": 1e-3,
}  # fmt: skip
JUDGED = "mixed"  # the load whose table is in docs/replay.md


class Client:
    """Streams completions of prompts that are lists of tokens."""

    def __init__(self, url):
        # vLLM closes idle ones after 5 s
        limits = httpx.Limits(max_connections=None, keepalive_expiry=4)
        self._http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits)
        self._dice = random.Random(0)
        self.merged = 0  # tokens without an event of their own

    def prompt(self, tokens):
        return [self._dice.randrange(*WORDS) for _ in range(tokens)]

    async def ask(self, prompt, tokens):
        """Return when it was sent and when each token came."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        times = [time.monotonic()]
        async with self._http.stream(
            "POST", "/v1/completions", json={**body, "temperature": 0}
        ) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
        # vLLM puts tokens into one event if the last is not yet written
        self.merged += tokens + 1 - len(times)
        return times


async def prefill_times(client):
    """Return (tokens, cached before them, seconds): one prompt at a time; a cached beginning is
    whole blocks.
    """
    shared = client.prompt(max(before for _, before in HITS))
    found = []
    await client.ask([*shared, *client.prompt(1)], 1)
    for tokens, before in (PROMPTS + HITS) * 5:
        sent, first = await client.ask([*shared[:before], *client.prompt(tokens)], 1)
        found.append((tokens, before, first - sent))
    sizes = PROMPTS + HITS
    return [
        (*size, statistics.median(seconds for *of, seconds in found if tuple(of) == size))
        for size in sizes
    ]


async def decode_times(client):
    """Return (batch, tokens before, seconds): the median ITL while all of a batch are decoded."""
    found = []
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        answers = await asyncio.gather(
            *(client.ask(client.prompt(context), 48) for _ in range(batch))
        )
        begin = max(times[1] for times in answers)
        end = min(times[-1] for times in answers)
        gaps = [
            b - a
            for times in answers
            for a, b in itertools.pairwise(times[1:])
            if begin <= a and b <= end
        ]
        if gaps:  # none, if the first has ended before the last has begun
            found.append((batch, context + 24, statistics.median(gaps)))
    return found


def fitted(prefills, decodes):
    """Return the engine with the least squares of relative errors, and its largest relative error
    in each fit.
    """
    rows = [[1, batch, batch * context] for batch, context, _ in decodes]
    (step, request, context), decode_error = _least_squares(
        rows, [seconds for *_, seconds in decodes]
    )
    rows = [[1, tokens, tokens * (cached + tokens / 2)] for tokens, cached, _ in prefills]
    (base, token, before), prefill_error = _least_squares(
        rows, [seconds for *_, seconds in prefills]
    )
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
        found = np.linalg.lstsq(
            rows[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None
        )[0]
        if min(found) >= 0:
            break
        del kept[int(np.argmin(found))]
    factors = np.zeros(rows.shape[1])
    factors[kept] = found
    return map(float, factors), float(max(abs(rows @ factors / seconds - 1)))


def mixed_load(model, *, count=MIXED, seed=1, share=0.4):
    """Return (at, tokens of the prompt, of them shared with all others, of the answer): some
    ``share`` of full load.
    """
    dice = random.Random(seed)
    sizes = [
        (dice.randrange(64, 1500), dice.choice((0, 0, 512)), dice.randrange(8, 96))
        for _ in range(count)
    ]
    work = statistics.mean(
        model.chunk_s(prompt, 0) + answer * model.batch_s(1, prompt) for prompt, _, answer in sizes
    )
    at = 0.0
    load = []
    for prompt, shared, answer in sizes:
        at += dice.expovariate(share / (work + model.step_s * 8))
        load.append((at, prompt + shared, shared, answer))
    return load


def held_out(model):
    """Return loads by name, in the form of ``mixed_load``."""
    return {
        JUDGED: mixed_load(model),
        "bursts of 4 prompts of 512": [
            (second * 1.5, 512, 0, 16) for second in range(8) for _ in range(4)
        ],
        "hits: 896 of 1,024 cached": [(number * 0.6, 1024, 896, 8) for number in range(16)],
        "8 answers at once": [(second * 3.0, 256, 0, 64) for second in range(3) for _ in range(8)],
    }


def training(model):
    """Return loads that the fit may look at."""
    return {
        "mixed, busier": mixed_load(model, count=60, seed=2, share=0.55),
        "bursts of 6 prompts of 300": [
            (second * 1.5, 300, 0, 12) for second in range(5) for _ in range(6)
        ],
        "12 answers at once": [
            (second * 3.0, 100, 0, 48) for second in range(2) for _ in range(12)
        ],
    }


def isolated(prefills, decodes):
    """Return what was measured one by one as loads and what was seen of them, in the forms of
    ``measured``.
    """
    for tokens, cached, seconds in prefills:
        load = [(number * 2.0, tokens + cached, cached, 1) for number in range(5)]
        yield load, [(seconds, None, [])] * 5
    for batch, context, seconds in decodes:
        load = [(0.0, context - 24, 0, 48)] * batch
        yield load, [(None, seconds, [seconds])] * batch


def features(side):
    """Return the numbers of one side of a load that a fit is judged by; NaN: there are none of this
    kind.
    """
    firsts = [first for first, *_ in side if first is not None]
    gaps = np.hstack([gaps for *_, gaps in side])
    return np.array([*_spread(firsts, (0.5, 0.95)), *_spread(gaps, (0.5, 0.95, 0.99))])


def medians(side):
    """Return the same of what was measured one by one: its median is all that is known."""
    firsts = [first for first, *_ in side if first is not None]
    gaps = np.hstack([gaps for *_, gaps in side])
    return np.array(
        [float(np.median(each)) if len(each) else float("nan") for each in (firsts, gaps)]
    )


def _spread(values, quantiles):
    if not len(values):
        return [float("nan")] * (len(quantiles) + 1)
    return [float(np.mean(values)), *(float(np.quantile(values, each)) for each in quantiles)]


def loss(model, loads, singles):
    """Return the mean of the logarithms by which a simulated engine is off; both: loads and what
    was measured.
    """
    both = ((loads, features), (singles, medians))
    return float(
        np.mean([np.mean([_off(model, *each, judge) for each in kind]) for kind, judge in both])
    )


def _off(model, load, real, judge):
    with np.errstate(invalid="ignore"):
        return float(np.nanmean(np.abs(np.log(judge(simulated(model, load)) / judge(real)))))


def searched(model, loads, singles, *, tries=TRIES):
    """Return a better engine and how far it is off: numbers are changed by chance, and what is
    better is kept.

    The size of the changes follows how often they succeed (the rule of one fifth, Rechenberg 1973).
    """
    chance = np.random.default_rng(0)
    best = np.log([getattr(model, name) or begin for name, begin in SEARCHED.items()])
    least = loss(_engine(model, best), loads, singles)
    size = 0.5
    for _ in range(tries):
        changed = best + size * chance.standard_normal(len(best)) * (chance.random(len(best)) < 0.4)
        found = loss(_engine(model, changed), loads, singles)
        size = max(0.02, size * (1.5 if found < least else 0.9))
        if found < least:
            best, least = changed, found
    return _engine(model, best), least


def _engine(model, numbers):
    values = {
        name: min(2.0, float(np.exp(value))) for name, value in zip(SEARCHED, numbers, strict=True)
    }
    return msgspec.structs.replace(model, **values)


async def measured(client, load):
    """Return (TTFT, mean ITL, all gaps) of each request of a load."""
    shared = client.prompt(1024)
    await client.ask(shared, 1)
    begin = time.monotonic() + 0.5

    async def one(at, tokens, same, answer):
        prompt = shared[:same] + client.prompt(tokens - same)
        await asyncio.sleep(begin + at - time.monotonic())
        return await client.ask(prompt, answer)

    answers = await asyncio.gather(*(one(*request) for request in load))
    return [
        (
            times[1] - times[0],
            (times[-1] - times[1]) / max(1, len(times) - 2),
            [b - a for a, b in itertools.pairwise(times[1:])],
        )
        for times in answers
    ]


def simulated(model, load):
    """Return the same, but all gaps of all requests with the first one."""
    loop = EventLoop()
    names = itertools.count(1000)
    engine = VirtualEngine(model, BLOCK, loop)
    first = {}
    last = {}
    engine.add(VirtualLeg([*range(1024 // BLOCK)], 1024, 1))  # what is shared
    loop.run()
    start = loop.now
    told = len(engine.log.gaps)
    for number, (at, tokens, same, answer) in enumerate(load):
        own = [next(names) for _ in range((tokens - same) // BLOCK)]
        leg = VirtualLeg(
            [*range(same // BLOCK), *own][: tokens // BLOCK],
            tokens,
            answer,
            first=lambda number=number, at=at: first.update({number: loop.now - start - at}),
            ended=lambda _, number=number, at=at: last.update({number: loop.now - start - at}),
        )
        loop.after(at, partial(engine.send, leg))
    loop.run()
    gaps = [gap for gap, weight in engine.log.gaps[told:] for _ in range(weight)]
    means = [
        (last[number] - first[number]) / max(1, answer - 1)
        for number, (*_, answer) in enumerate(load)
    ]
    return [(first[number], means[number], [] if number else gaps) for number in range(len(load))]


def main():
    end_as_by_ctrl_c()
    model_dir = ROOT / ".pdrelay/models/tiny"
    ensure_model(model_dir)
    spec = engine_spec(
        "replay-fit", model_dir, max_model_len=2048, block_size=BLOCK,
        extra_args=("--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", "256"),
    )  # fmt: skip
    with open_fleet(ROOT / ".pdrelay/logs/bench") as fleet:
        fleet.wait_ready([start_engine(fleet, spec)], timeout_s=300)
        asyncio.run(_fit(spec.base_url))


async def _fit(url):
    client = Client(url)
    for size in (100, 1000):  # what is slow only once
        await asyncio.gather(*(client.ask(client.prompt(size), 8) for _ in range(4)))
    prefills = await prefill_times(client)
    decodes = await decode_times(client)
    guess, prefill_error, decode_error = fitted(prefills, decodes)
    for name, rows in (
        ("prefill: tokens, cached, s", prefills),
        ("decode: batch, context, s", decodes),
    ):
        print(name, json.dumps([[round(value, 5) for value in row] for row in rows]))
    print(
        f"largest error of the first guess: prefill {prefill_error:.0%}, decode {decode_error:.0%}"
    )
    trained = [(load, await measured(client, load)) for load in training(guess).values()]
    judges = held_out(guess)
    real = {name: await measured(client, load) for name, load in judges.items()}
    print(f"{client.merged} tokens came together with another one")
    model, off = searched(guess, trained, [*isolated(prefills, decodes)])
    print(f"mean error of all that it was fitted to: a factor of {np.exp(off):.2f}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
    print(OUT.read_text())
    for name, load in judges.items():
        compare(name, load, real[name], simulated(model, load))
    PAGE.write_text(
        page({name: (real[name], simulated(model, load)) for name, load in judges.items()})
    )
    print(f"\n{PAGE.read_text()}\nwritten to {OUT} and {PAGE}")


def page(sides):
    """Return the tables for docs/replay.md: the mixed load in full, and one row for each of the
    others.
    """
    rows = [
        f"| {what} | {_ms(seen)} | {_ms(made)} | {_error(made, seen)} |"
        for what, seen, made in _numbers(*sides[JUDGED])
    ]
    others = []
    for name, both in sides.items():
        if name != JUDGED:
            found = {what: (seen, made) for what, seen, made in _numbers(*both)}
            cells = [
                f"{_ms(seen)}, {_ms(made)} ({_error(made, seen)})"
                for seen, made in map(found.get, SHOWN)
            ]
            others.append(f"| {name} | {' | '.join(cells)} |")
    head = ["|  | measured | simulated | error |", "|---|---|---|---|"]
    more = [f"| measured, simulated (error) | {' | '.join(SHOWN)} |", "|---|" + "---|" * len(SHOWN)]
    return "\n".join([*head, *rows, "", *more, *others, ""])


SHOWN = ("TTFT p50", "TTFT p95", "ITL p50", "ITL p99")


def _numbers(real, made):
    """Yield (what, measured, simulated), in seconds."""
    for title, index in (("TTFT", 0), ("ITL", 2)):
        seen, told = (np.hstack([each[index] for each in side]) for side in (real, made))
        for what, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            yield (
                f"{title} {what}",
                float(np.quantile(seen, share)),
                float(np.quantile(told, share)),
            )
        yield f"{title} mean", float(np.mean(seen)), float(np.mean(told))


def _ms(seconds):
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"


def _error(made, seen):
    return f"{100 * (made / seen - 1):+.0f} %"


def compare(name, load, real, made):
    """Print both sides of a load, and how far requests are from what is foretold."""
    print(f"\n{name}: {len(load)} requests in {load[-1][0]:.0f} s")
    for what, seen, told in _numbers(real, made):
        both = f"measured {seen * 1e3:7.1f} ms, simulated {told * 1e3:7.1f} ms"
        print(f"  {what}: {both}, {_error(told, seen)}")
    for title, index in (("TTFT", 0), ("mean ITL", 1)):
        errors = np.array(
            [told[index] / seen[index] - 1 for seen, told in zip(real, made, strict=True)]
        )
        median, p95 = np.quantile(abs(errors), (0.5, 0.95))
        sign = f"{np.median(errors):+.0%} signed"
        print(
            f"  {title} of a request: error {median:.0%} at the median ({sign}), {p95:.0%} at p95"
        )


if __name__ == "__main__":
    main()
