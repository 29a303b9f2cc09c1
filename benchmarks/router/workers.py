"""How much more two workers serve than one, on two cores.

``python benchmarks/router/workers.py`` writes docs/benchmarks/workers.json and a part of router.md
there; ``--quick`` makes short runs and writes to .pdrelay/bench. Nothing else may run meanwhile.
The engines compute nothing and the load generator compares every answer; but they take processor
time of the same two cores, so three things are measured: how far the whole comes from one core to
two, what the router alone costs a request, and how both go with one worker on two cores.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import page
from benchmarks.router import trial
from benchmarks.router.contestants import CONTESTANTS, ROOT, Contestant

PLAN = {"connections": 64}
SETUPS = {  # name: (workers, cores for everything together)
    "1 worker, 1 core": (1, 1),
    "1 worker, 2 cores": (1, 2),
    "2 workers, 2 cores": (2, 2),
}
ONE, ALONE, TWO = SETUPS


TEXT = """
# One router, several workers

`{command}`, {about}. {connections} connections, 512 B prompts, 2 tokens, streamed, two prefill and two decode engines
that compute nothing, one load generator; all on the same cores as the router. Numbers are medians of the rounds.

| | requests a second | router, CPU-ms a request | cores of the router | cores of all |
|---|---|---|---|---|
{rows}

- **{whole:.2f}**: two workers on two cores against one worker on one core, load and engines included on both sides; 2
  would be perfect.
- **{beside:.2f}**: two workers against one on the same two cores. One worker cannot use more than one core; of the
  other one, load and engines take their part either way.
- **{dear:.2f}**: CPU of the router a request, two workers against one. With load and engines elsewhere, two workers on
  two cores serve {elsewhere:.2f} times what one serves on one.
- {faults} faults: every answer was compared byte for byte, and both legs of every request were counted.
"""


class Shared:
    """Everything runs on the same cores."""

    def __init__(self, count):
        self.router = self.rest = set(sorted(os.sched_getaffinity(0))[:count])

    def pinned(self, cores):
        """Return what a child does before it runs."""
        return lambda: os.sched_setaffinity(0, cores)


def measured(workers, cores, seconds):
    """Return what one run has seen."""
    pdrelay = CONTESTANTS["pdrelay"]
    admin_ports = []

    def command(prefill, decode, own):
        admin_ports[:] = range(own[1], own[1] + workers)
        more = ["--workers", workers, "--admin-port", own[1], "--log-level", "warning"]
        return [*pdrelay.command(prefill, decode, own), *more]

    contestant = Contestant(f"pdrelay-{workers}", "", command)
    shared = Shared(cores)
    with (
        trial.engines(shared, {}) as (process, ports),
        trial.router(shared, contestant, ports, "workers") as (child, port, _),
    ):
        trial.serves(port, contestant.name)
        until_all_serve(admin_ports)
        before = trial.get(ports["decode"][0], "/bench/counts")
        plan = PLAN | {
            "port": port,
            "router": child.pid,
            "engines": process.pid,
            "seconds": seconds,
        }
        found = trial.carry_out(shared, plan)
        found["legs"] = trial.legs(ports["decode"][0], before)
    trial.check(found, contestant)
    return found


def until_all_serve(admin_ports):
    deadline = time.monotonic() + 60.0
    for port in admin_ports:
        while not listens(port):
            if time.monotonic() > deadline:
                raise trial.Failed(f"no worker listens at {port}")
            time.sleep(0.05)


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def numbers(runs):
    """Return medians: requests a second, the router's CPU-ms a request, cores it used, cores all
    used.
    """
    rows = []
    for run in runs:
        cpu = run["cpu"]
        count = run["done"]
        seconds = run["seconds"]
        rows.append(
            (
                count / seconds,
                1000 * cpu["router"] / count,
                cpu["router"] / seconds,
                sum(cpu.values()) / seconds,
            )
        )
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def written(seen, about):
    """Return the text of the page."""
    found = {name: numbers(runs) for name, runs in seen.items()}
    rows = [
        f"| {name} | {rate:.0f} | {cost:.3f} | {router:.2f} | {whole:.2f} |"
        for name, (rate, cost, router, whole) in found.items()
    ]
    lines = TEXT.format(
        command=" ".join(["benchmarks/router/workers.py", *sys.argv[1:]]),
        about=about,
        connections=PLAN["connections"],
        rows="\n".join(rows),
        whole=found[TWO][0] / found[ONE][0],
        beside=found[TWO][0] / found[ALONE][0],
        dear=found[TWO][1] / found[ALONE][1],
        elsewhere=2 * found[ALONE][1] / found[TWO][1],
        faults=sum(sum(run["faults"].values()) for runs in seen.values() for run in runs),
    )
    return lines.lstrip()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short runs: does it work?")
    parser.add_argument("--rounds", type=int, help="turns of every setup (5; quick: 1)")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 5)
    seconds = 2.0 if args.quick else 5.0
    seen = {name: [] for name in SETUPS}
    for round_ in range(rounds):
        for name, (workers, cores) in SETUPS.items():
            seen[name].append(measured(workers, cores, seconds))
            said = ", ".join(f"{one:.3f}" for one in numbers(seen[name][-1:]))
            print(f"{round_ + 1}/{rounds} {name}: {said}", file=sys.stderr)
    about = (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {os.cpu_count()} cores, {rounds} rounds of "
        f"{seconds:g} s"
    )
    out = (ROOT / ".pdrelay/bench" if args.quick else page.PAGES) / "workers.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(seen, indent=1) + "\n")
    page.write_page(out, written(seen, about))
    print(page.page_of(out).read_text())


if __name__ == "__main__":
    main()
