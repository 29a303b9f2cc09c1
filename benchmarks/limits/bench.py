"""Each cost beside the least that it could be, measured in the same run: what is left to win.

``make bench-limits`` writes docs/benchmarks/limits.json and a part of connector.md there. An engine
without a connector runs all the time; beside it first a pair with our connector and a router, then
a pair with vLLM's, then an engine whose connector loads nothing.
"""

import itertools
import json
import os
import statistics
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx

from benchmarks import page
from benchmarks.connector import measure, progress
from benchmarks.connector.client import Client, prompts
from benchmarks.connector.models import PACKAGES, POSITIONS, tiny_model
from benchmarks.connector.pairs import (
    CHUNK,
    KV_CACHE_MIB,
    LEG_LENGTHS,
    LOGS,
    NIXL_PULL,
    PULL,
    running,
)
from benchmarks.page import paragraph, table
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import Role
from support.cluster import ROOT, base_url, engine_spec, router_command, start_engine
from support.proc import cpu_seconds
from support.router_kind import said

FULL = {"legs": 24, "reads": 20, "routed": 60}
QUICK = {"legs": 4, "reads": 4, "routed": 10}
PREFILL, ROUTED = 1024, 256  # tokens of a prompt
TURNS = 5  # in which requests through the router, and by hand, are sent
CONNECTORS = (PULL, NIXL_PULL)
AT_ONCE = """The floor of the path: a connector that loads nothing, and says in the step of the order that it has.
VLLM makes a step
for the order, sleeps a millisecond, and makes another one (`vllm/v1/engine/core.py`). It computes one token then, and
of a cached prompt all of its last block.
"""


def main():
    args = page.parser_of(__doc__, "few requests").parse_args()
    page.end_as_by_ctrl_c()
    counts = QUICK if args.quick else FULL
    seen = {
        "about": page.about(*PACKAGES),
        "counts": counts,
        "load": os.getloadavg()[0],
        "router": said(),
    }
    seen["reads"] = {
        name: progress.measured(progress.DEFAULT, name, rounds=counts["reads"], idle=0.1)
        for name in progress.TRANSPORTS
    }
    model = tiny_model()
    prompt = prompts()
    with Client() as client, open_fleet(LOGS) as fleet:
        # the first one reads its files from the disk
        started(fleet, _spec("cold", model), stops=True)
        plain = _spec("plain", model)
        seen["start"], pid = started(fleet, plain)
        for kind in CONNECTORS:
            alone = _spec(f"{kind.slug}-alone", model, role=Role.PREFILL, connector=kind.connector)
            found = seen[kind.name] = {"start": started(fleet, alone, stops=True)[0]}
            with running(kind, model, client, prompt) as pair:
                found |= legs(pair, plain, client, prompt, counts["legs"])
                found["idle"], found["plain idle"] = idle(pair.pids), idle((pid,))
                if kind is PULL:
                    seen["routed"] = routed(pair, prompt, counts["routed"])
        at_once = _at_once(model)
        started(fleet, at_once)
        seen["at once"] = legs_at_once(at_once, plain, client, prompt, counts["legs"])
    out = page.out_of(args, "limits")
    page.write(seen, out, parts)
    page.show(out)


def _spec(name, model, **options):
    chunks = ("--max-num-batched-tokens", str(CHUNK))
    return engine_spec(
        name,
        model,
        max_model_len=POSITIONS,
        kv_cache_mib=KV_CACHE_MIB,
        extra_args=chunks,
        **options,
    )


def _at_once(model):
    """Return an engine whose connector loads nothing."""
    spec = _spec(
        "at-once",
        model,
        extra_env={"PYTHONPATH": str(ROOT), "PDRELAY_BENCH_STAMPS": str(LOGS / "at-once.stamps")},
    )
    config = {
        "kv_connector": "LoadsAtOnce",
        "kv_connector_module_path": "benchmarks.connector.stamped",
        "kv_role": "kv_consumer",
    }
    args = ("--kv-transfer-config", json.dumps(config))
    return replace(spec, extra_args=(*spec.extra_args, *args))


def started(fleet, spec, *, stops=False):
    """Start an engine, and stop it if asked; return the seconds until it was ready, and its
    process.
    """
    began = time.monotonic()
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=300)
    seconds = time.monotonic() - began
    if stops:
        fleet.stop(child)
    return seconds, child.pid


def legs(pair, plain, client, prompt, count):
    """Measure decode legs beside the same prompt from D's own cache, and prefill legs beside an
    engine without P/D.

    D rests while P computes before either leg: right after another one it answers 2 ms sooner.
    """
    found = {"decode": {}, "cached": {}, "prefill": [], "computed": []}
    for number in range(count + 1):
        for length in LEG_LENGTHS:
            tokens = prompt(length)
            sent = pair.send(tokens)
            client.first_leg(pair.p, prompt(length), is_leg=False)
            began = time.monotonic()
            cached = client.decode(pair.d, tokens) - began
            if number:
                found["decode"].setdefault(str(length), []).append(sent.first_token - sent.decode)
                found["cached"].setdefault(str(length), []).append(cached)
        ways = [("prefill", pair.p), ("computed", plain)]
        # who comes second finds warmer caches
        for name, engine in ways if number % 2 else reversed(ways):
            began = time.monotonic()
            client.first_leg(engine, prompt(PREFILL), is_leg=name == "prefill")
            if number:
                found[name].append(time.monotonic() - began)
    return found


def legs_at_once(d, plain, client, prompt, count):
    """Measure the same two legs where nothing is loaded; another engine computes before each."""
    found = {"decode": {}, "cached": {}}
    for number, length in itertools.product(range(count + 1), LEG_LENGTHS):
        tokens = prompt(length)
        for name, params in (("decode", {"do_remote_prefill": True}), ("cached", None)):
            client.first_leg(plain, prompt(length), is_leg=False)
            began = time.monotonic()
            seconds = client.decode(d, tokens, params=params) - began
            if number:
                found[name].setdefault(str(length), []).append(seconds)
    return found


def idle(pids):
    time.sleep(measure.SETTLE)
    return measure.cores(pids) / len(pids)


@contextmanager
def cpu_of(found, **leaders):
    """Add the CPU seconds that process groups, and this process, use during the block."""
    before = {name: sum(map(cpu_seconds, pids)) for name, pids in leaders.items()}
    own = time.process_time()
    yield
    used = {name: sum(map(cpu_seconds, pids)) - before[name] for name, pids in leaders.items()}
    for name, seconds in (used | {"client": time.process_time() - own}).items():
        found[name] = found.get(name, 0.0) + seconds


def routed(pair, prompt, count):
    """Measure what a router costs: its CPU beside that of engines and client, and its time beside
    both legs by hand.
    """
    found = {"first": [], "by hand": []}
    with open_fleet(LOGS) as fleet, httpx.Client(timeout=60, trust_env=False) as http:
        command = router_command("limits", [pair.p], [pair.d])
        router = fleet.start(command)
        fleet.wait_ready([router], timeout_s=60)
        url = f"{base_url(command)}/v1/completions"

        def ask():
            body = {
                "model": "tiny",
                "prompt": prompt(ROUTED),
                "max_tokens": 2,
                "ignore_eos": True,
                "stream": True,
            }
            began = time.monotonic()
            times = []
            text = b""
            with http.stream("POST", url, json=body) as answer:
                answer.raise_for_status()
                for piece in answer.iter_bytes():
                    times.append(time.monotonic() - began)
                    text += piece
            if not text.endswith(b"data: [DONE]\n\n") or b'"error"' in text:
                raise RuntimeError(f"the router answers {text.decode()}")
            return times[0]

        for _ in range(5):
            ask()
        for _ in range(TURNS):
            with cpu_of(found, router=(router.pid,), engines=pair.pids):
                found["first"] += [ask() for _ in range(count // TURNS)]
            sent = [pair.send(prompt(ROUTED)) for _ in range(count // TURNS)]
            found["by hand"] += [each.first_token - each.start for each in sent]
    return found


def parts(seen):
    """Return the parts of the page."""
    counts = seen["counts"]
    about = paragraph(f"""
`make bench-limits` measures everything in a few minutes and writes this part; with `QUICK=1` it sends few requests, and
writes to `.pdrelay/bench`. The raw numbers are in `limits.json`. CPU engines with the tiny model, over loopback.
Medians of {counts["legs"]} legs of each
kind, {counts["reads"]} reads and {counts["routed"]} requests, which take turns with their floors. Each ratio is with
the floor beside it; the floor that is shown is that of our connector. The load average was {seen["load"]:.1f} when it
began: on a busy machine read the ratios, not the times. The router: {seen["router"]}.""")
    heads = ["cost", "floor, in the same run", "floor", PULL.name, "ratio", NIXL_PULL.name, "ratio"]
    return [
        "# Costs beside their floors\n",
        page.setting({"": seen["about"]}),
        about,
        table(heads, [*_legs(seen), *_engines(seen), *_reads(seen), *_router(seen)]),
        paragraph(AT_ONCE),
        table(
            ["prompt, tokens", "from D's cache, ms", "loaded at once, ms", "ratio"],
            _rows_at_once(seen["at once"]),
        ),
    ]


def _row(cost, floor, unit, pairs):
    """A row; the floor that is shown is that beside our connector, each ratio is with its own."""
    cells = []
    for value, least in pairs:
        # an engine that rests may use no tick of the clock
        cells += [unit.format(value), f"{value / least:.2f}" if least else ""]
    return [cost, floor, unit.format(pairs[0][1]), *cells, *["" for _ in range(4 - len(cells))]]


def _legs(seen):
    ms = lambda values: statistics.median(values) * 1e3  # noqa: E731
    ours = [seen[kind.name] for kind in CONNECTORS]
    for length in LEG_LENGTHS:
        pairs = [
            (ms(each["decode"][str(length)]), ms(each["cached"][str(length)])) for each in ours
        ]
        yield _row(
            f"decode leg, {length:,} tokens, ms", "the same prompt from D's cache", "{:.1f}", pairs
        )
    pairs = [(ms(each["prefill"]), ms(each["computed"])) for each in ours]
    yield _row(
        f"prefill leg, {PREFILL:,} tokens, ms",
        "the same engine without a connector",
        "{:.1f}",
        pairs,
    )


def _rows_at_once(found):
    for length in LEG_LENGTHS:
        cached, decode = (
            statistics.median(found[name][str(length)]) * 1e3 for name in ("cached", "decode")
        )
        yield [f"{length:,}", f"{cached:.1f}", f"{decode:.1f}", f"{decode / cached:.2f}"]


def _engines(seen):
    ours = [seen[kind.name] for kind in CONNECTORS]
    pairs = [(each["idle"], each["plain idle"]) for each in ours]
    yield _row("idle engine, cores", "the same engine without a connector", "{:.3f}", pairs)
    pairs = [(each["start"], seen["start"]) for each in ours]
    yield _row("start of an engine, s", "the same engine without a connector", "{:.1f}", pairs)


def _reads(seen):
    for name, each in seen["reads"].items():
        yield _row(
            f"64 MiB in 4,096 pieces, {name}, GB/s",
            "memcpy",
            "{:.2f}",
            [(each["read"] / 1e9, each["copied"] / 1e9)],
        )


def _router(seen):
    found = seen["routed"]
    ms = 1e3 / seen["counts"]["routed"]
    pair = found["router"] * ms, (found["engines"] + found["client"]) * ms
    yield _row("router, CPU ms a request", "what engines and client use for it", "{:.2f}", [pair])
    pair = statistics.median(found["first"]) * 1e3, statistics.median(found["by hand"]) * 1e3
    yield _row("first token through the router, ms", "both legs sent by hand", "{:.1f}", [pair])


if __name__ == "__main__":
    main()
