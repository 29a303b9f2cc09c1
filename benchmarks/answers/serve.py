"""``vllm bench serve``, three times: our router, one engine, and the in-tree connector behind a
demonstration proxy.

    .venv/bin/python -m benchmarks.answers.serve

Rounds alternate: P and D with our connector, asked through the router and D alone; then P and D
with vLLM's NixlConnector, asked through ``toy_proxy.py``, which does what vLLM's demonstration
proxy does. Each fleet has the machine alone. Prompts are random words that nobody has asked before.
The exit code is 1 if a request failed, or if an engine pair moved no KV.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks import page
from benchmarks.answers.ask import bytes_moved
from benchmarks.router.contestants import CONTESTANTS
from pdrelay_tools.local.plan import SMOLLM2_FOLDER
from pdrelay_tools.local.processes import Command, open_fleet
from pdrelay_tools.local.recipe import Connector, Role
from support import router_kind
from support.cluster import (
    MODEL_NAME,
    ROOT,
    base_url,
    engine_spec,
    free_ports,
    router_command,
    start_engine,
)

ROUTER = "pdrelay, pull"
ONE_ENGINE = "one engine"
IN_TREE = "NixlConnector behind the demonstration proxy"
SHOWN = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "median_e2el_ms", "output_throughput")
START_S = 600


def main():
    args = arguments()
    page.end_as_by_ctrl_c()
    os.environ.setdefault(router_kind.CHOICE, "plain")  # as `make up` runs it
    seen = defaultdict(list)
    moved = defaultdict(int)
    seeds = itertools.count()
    order = [Connector.PDRELAY, Connector.NIXL]
    for _ in range(args.rounds):
        for connector in order:
            with engines(args.model, connector) as (targets, pair):
                for name, url in targets.items():
                    before = moved_by(pair)
                    seen[name].append(bench(args, url, seed=next(seeds)))
                    moved[name] += moved_by(pair) - before
                    print(name, {key: round(seen[name][-1][key], 1) for key in SHOWN}, flush=True)
        order.reverse()
    print_table(seen, moved)
    failed = sum(result["failed"] for results in seen.values() for result in results)
    still = [name for name in seen if name != ONE_ENGINE and not moved[name]]
    if failed or still:
        sys.exit(f"{failed} requests failed; no KV moved: {', '.join(still) or 'nowhere'}")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=ROOT / SMOLLM2_FOLDER, help="a folder (that of `make up`)"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=12, help="of each run")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--input", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=32, help="tokens")
    return parser.parse_args()


@contextmanager
def engines(model, connector):
    """Start P, D and what stands before them; yields URLs by the name of what is asked, and the
    pair.
    """
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as logs, open_fleet(Path(logs)) as fleet:
        pair = [
            engine_spec(name, model, role=role, connector=connector, extra_args=("--dtype", "auto"))
            for name, role in (("prefill", Role.PREFILL), ("decode", Role.DECODE))
        ]
        fleet.wait_ready([start_engine(fleet, spec) for spec in pair], timeout_s=START_S)
        prefill, decode = pair
        if connector is Connector.PDRELAY:
            command = router_command("router", [prefill], [decode])
            targets = {ROUTER: base_url(command), ONE_ENGINE: decode.base_url}
        else:
            command = toy_proxy(prefill, decode)
            targets = {IN_TREE: base_url(command)}
        fleet.wait_ready([fleet.start(command)], timeout_s=60)
        yield targets, pair


def toy_proxy(prefill, decode):
    """Return how to start the demonstration proxy."""
    port = free_ports(1)[0]
    argv = [str(word) for word in CONTESTANTS["toy"].command([prefill.port], [decode.port], [port])]
    return Command("proxy", argv, {"PATH": "/usr/bin:/bin"}, f"http://127.0.0.1:{port}/health")


def bench(args, url, *, seed):
    """Run ``vllm bench serve`` against a server; return its result."""
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as folder:
        options = {
            "--base-url": url,
            "--model": MODEL_NAME,
            "--tokenizer": args.model.resolve(),
            "--dataset-name": "random",
            "--seed": seed,
            "--random-input-len": args.input,
            "--random-output-len": args.output,
            "--num-prompts": args.prompts,
            "--max-concurrency": args.concurrency,
            "--num-warmups": 2,
            "--percentile-metrics": "ttft,tpot,itl,e2el",
            "--temperature": 0,
            "--result-dir": folder,
            "--result-filename": "result.json",
        }
        argv = [Path(sys.executable).with_name("vllm"), "bench", "serve", "--ignore-eos"]
        argv += ["--disable-tqdm", "--save-result", *itertools.chain(*options.items())]
        done = subprocess.run(
            [*map(str, argv)], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(
                f"vllm bench serve ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return json.loads((Path(folder) / "result.json").read_text())


def moved_by(pair):
    """Return the bytes of KV that both engines have counted."""
    with httpx.Client(trust_env=False) as client:
        return sum(bytes_moved(client, spec.base_url) for spec in pair)


def print_table(seen, moved):
    """Print the medians of the runs as a table of a page."""
    rows = []
    for name, results in seen.items():
        counts = [sum(result[key] for result in results) for key in ("completed", "failed")]
        medians = [f"{statistics.median(result[key] for result in results):.1f}" for key in SHOWN]
        rows.append([name, *counts, f"{moved[name] / 1e6:.0f}", *medians])
    print(f"\n{page.table(['asked', 'requests', 'failed', 'KV moved, MB', *SHOWN], rows)}")


if __name__ == "__main__":
    main()
