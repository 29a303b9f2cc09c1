"""Our connector beside vLLM's NixlConnector: time to the first token of the decode leg, and what an idle engine costs.

``make bench-connector`` runs it and writes docs/benchmarks/connector.md. One pair of engines runs at a time (vLLM's
burns a core per engine even when idle, and would slow the other), in alternating rounds on the same machine.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.cluster import ROOT, engine_spec, metrics, start_engine, wait_until
from support.legs import prefill, prompt_of
from xpyd_proxy.local.model import ensure_model
from xpyd_proxy.local.processes import open_fleet
from xpyd_proxy.local.recipe import Connector, Role

LENGTHS = (32, 256, 1500)  # tokens of a prompt
CONNECTORS = {"xpyd": Connector.XPYD, "vLLM NixlConnector": Connector.NIXL}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """What one connector showed."""

    first_token: dict = field(default_factory=lambda: {length: [] for length in LENGTHS})  # s, decode leg
    prefill: dict = field(default_factory=lambda: {length: [] for length in LENGTHS})  # s
    idle: list = field(default_factory=list)  # cores, P and D together
    holding: list = field(default_factory=list)  # cores of P while one finished request is held


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=50, help="per length and connector")
    parser.add_argument("--rounds", type=int, default=2, help="the pairs take turns so often")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/connector.md")
    args = parser.parse_args()
    model = ROOT / ".xpyd/models/tiny"
    ensure_model(model)
    seen = {name: Seen() for name in CONNECTORS}
    for round_ in range(args.rounds):
        for name, connector in CONNECTORS.items():
            print(f"round {round_ + 1}: {name}", flush=True)
            run_pair(connector, model, seen[name], args.requests // args.rounds, 1000 * round_)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(report(seen, args))
    args.out.with_suffix(".json").write_text(json.dumps({name: vars(found) for name, found in seen.items()}) + "\n")
    print(args.out.read_text())


def run_pair(connector, model, seen, requests, offset):
    with open_fleet(ROOT / ".xpyd/logs/bench") as fleet:
        specs = [engine_spec(f"{connector.value}-{role.value}", model, role=role, connector=connector) for role in Role]
        children = [start_engine(fleet, spec) for spec in specs]
        fleet.wait_ready(children, timeout_s=300)
        (p, d), pids = specs, [child.pid for child in children]
        for length in LENGTHS:  # first contact and every code path once, outside the measurement
            one(p, d, prompt_of(offset + length, length))
        for number in range(requests):
            for length in LENGTHS:
                first, second = one(p, d, prompt_of(offset + 7 * number + length, length))
                seen.prefill[length].append(first)
                seen.first_token[length].append(second)
        seen.idle.append(cores(pids, 5))
        prefill(p, prompt_of(offset + 999, 256))
        seen.holding.append(cores(pids[:1], 5))
        wait_until(lambda: metrics(p)["vllm:kv_cache_usage_perc"] == 0, seconds=60, what="P frees")


def one(p, d, prompt):
    """Return the seconds of the prefill leg, and of the decode leg until its first token."""
    start = time.perf_counter()
    params = prefill(p, prompt)
    middle = time.perf_counter()
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": True, "kv_transfer_params": params}
    with httpx.stream("POST", f"{d.base_url}/v1/completions", json=body, timeout=120, trust_env=False) as reply:
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        first_token = time.perf_counter()
        for _ in lines:
            pass
    return middle - start, first_token - middle


def cores(leaders, seconds):
    """Return the cores that process groups use during some seconds."""
    before = sum(map(cpu_seconds, leaders))
    time.sleep(seconds)
    return (sum(map(cpu_seconds, leaders)) - before) / seconds


def cpu_seconds(leader):
    """Return the CPU seconds of a process and all processes of its session."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == leader:
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def report(seen, args):
    rows = "".join(row(length, seen) for length in LENGTHS)
    idle = {name: statistics.mean(found.idle) for name, found in seen.items()}
    holding = {name: statistics.mean(found.holding) for name, found in seen.items()}
    ours, theirs = CONNECTORS
    return f"""# Decode leg: xpyd beside vLLM's NixlConnector

`make bench-connector`: vLLM 0.32 CPU engines (tiny model, float32), NIXL over loopback, {os.cpu_count()} cores,
{platform.system()} {platform.machine()}; {args.requests} sequential requests per row and connector, the two pairs in
{args.rounds} alternating rounds. Milliseconds from sending the decode leg to its first token; every leg is
sent by a new HTTP client, whose own start (tens of milliseconds, the same for both) is part of each number.

| prompt, tokens | xpyd median | p95 | NixlConnector median | p95 | ratio of medians |
|---|---|---|---|---|---|
{rows}
| cores | xpyd | NixlConnector |
|---|---|---|
| idle pair (P and D after their traffic, everything in both processes) | {idle[ours]:.3f} | {idle[theirs]:.3f} |
| P while one finished request is held | {holding[ours]:.3f} | {holding[theirs]:.3f} |
"""


def row(length, seen):
    cells = []
    medians = []
    for found in seen.values():
        times = sorted(found.first_token[length])
        medians.append(statistics.median(times))
        cells += [f"{1e3 * medians[-1]:.1f}", f"{1e3 * times[int(0.95 * (len(times) - 1))]:.1f}"]
    return f"| {length} | {' | '.join(cells)} | {medians[0] / medians[1]:.2f} |\n"


if __name__ == "__main__":
    main()
