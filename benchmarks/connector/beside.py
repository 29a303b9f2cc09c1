"""The connector of this checkout beside that of another: time to first token of the decode leg,
requests in turn.

``beside.py OTHER [--requests N] [--tokens N] [--mode pull|push]``; OTHER is a checkout of pdrelay.
Four CPU engines run at the same time, a pair for each checkout. Each prompt goes to one pair and
then to the other, so that whatever the machine does meanwhile meets both. Engines share a secret.
Prints a table of Markdown, with the CPU of engines at rest.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks import page
from benchmarks.connector.client import Client, prompts
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import Connector, Role, engine
from support.cluster import ROOT, engine_spec
from support.proc import cpu_seconds

LOGS = ROOT / ".pdrelay/logs/beside"
SECRET = "a secret of the benchmark"


def main():
    options = arguments()
    page.end_as_by_ctrl_c()
    LOGS.mkdir(parents=True, exist_ok=True)
    model = ROOT / ".pdrelay/models/tiny"
    ensure_model(model)
    with open_fleet(LOGS) as fleet, Client() as client:
        pairs = {
            name: start(fleet, model, name, path, options.mode)
            for name, path in checkouts(options.other).items()
        }
        fleet.wait_ready(
            [child for pair in pairs.values() for child in pair.children], timeout_s=300
        )
        new_prompt = prompts()
        times = {name: [] for name in pairs}
        for pair in pairs.values():
            client.meet(pair, new_prompt(options.tokens))
        for number in range(options.requests + 10):
            order = list(pairs) if number % 2 else list(pairs)[::-1]
            question = new_prompt(options.tokens)
            for name in order:
                legs = getattr(client, options.mode)(pairs[name], question)
                if number >= 10:
                    times[name].append(1000 * (legs.first_token - legs.decode))
        report(options, times, {name: idle(pair) for name, pair in pairs.items()})


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    return parser.parse_args()


def checkouts(other):
    return {"other": other.resolve(), "this": ROOT}


def start(fleet, model, name, checkout, mode):
    """Start a prefill and a decode engine with the connector of a checkout."""
    env = {"PYTHONPATH": str(checkout / "connector"), "PDRELAY_CONNECTOR_SECRET": SECRET}
    specs = [
        engine_spec(
            f"{name}-{role.value}",
            model,
            role=role,
            connector=Connector.PDRELAY,
            mode=TransferMode(mode),
            extra_env=env,
        )
        for role in Role
    ]
    children = [fleet.start(engine(spec, os.environ)) for spec in specs]
    return SimpleNamespace(p=specs[0], d=specs[1], children=children)


def idle(pair, seconds=3.0):
    """Return the share of a core that each engine of a pair uses while nothing is asked."""
    before = [cpu_seconds(child.pid) for child in pair.children]
    start = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    return [
        (cpu_seconds(child.pid) - then) / took
        for child, then in zip(pair.children, before, strict=True)
    ]


def report(options, times, cores):
    print(
        f"{options.mode}, {options.requests} prompts of {options.tokens} tokens; ms to D's first "
        f"token\n"
    )
    print(
        "| connector | p25 | median | p75 | idle, share of a core: P | D "
        "|\n|---|---|---|---|---|---|"
    )
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        p, d = cores[name]
        print(f"| {name} | {low:.2f} | {middle:.2f} | {high:.2f} | {p:.3f} | {d:.3f} |")
    ratios = [new / old for old, new in zip(times["other"], times["this"], strict=True)]
    medians = statistics.median(times["this"]) / statistics.median(times["other"])
    each = statistics.median(ratios)
    print(
        f"\nthis / other: {medians:.3f} of the medians, {each:.3f} as median of each prompt's ratio"
    )


if __name__ == "__main__":
    main()
