"""How much more two workers serve than one, on two cores.

``make bench-workers`` writes docs/benchmarks/workers.json and a part of router.md there. The
engines compute nothing and the load generator compares every answer; but they take processor time
of the same two cores, so three things are measured: how far the whole comes from one core to two,
what the router alone costs a request, and how both go with one worker on two cores.
"""

import os
import socket
import statistics
import sys
import time

from benchmarks import page
from benchmarks.router import report, trial
from benchmarks.router.contestants import CONTESTANTS

CONNECTIONS = 64
ROUNDS, QUICK_ROUNDS = 5, 1
RUN_S, QUICK_RUN_S = 5.0, 2.0
START_S = 60.0
SETUPS = {  # name: (workers, cores for everything together)
    "1 worker, 1 core": (1, 1),
    "1 worker, 2 cores": (1, 2),
    "2 workers, 2 cores": (2, 2),
}
ONE, ALONE, TWO = SETUPS


def main():
    args = page.parser_of(__doc__, "short runs").parse_args()
    page.end_as_by_ctrl_c()
    rounds, seconds = (QUICK_ROUNDS, QUICK_RUN_S) if args.quick else (ROUNDS, RUN_S)
    seen = {"about": page.about(), "seconds": seconds, "runs": {name: [] for name in SETUPS}}
    for round_ in range(rounds):
        for name, setup in SETUPS.items():
            seen["runs"][name].append(measured(*setup, seconds))
            print(
                f"{round_ + 1}/{rounds} {name}: {report.line(seen['runs'][name][-1])}",
                file=sys.stderr,
            )
    out = page.out_of(args, "workers")
    page.write(seen, out, parts)
    page.show(out)


def measured(workers, count, seconds):
    """Return what one run has seen."""
    pdrelay = CONTESTANTS["pdrelay"]
    shared = set(sorted(os.sched_getaffinity(0))[:count])
    cores = trial.Cores(shared, shared)
    admin_ports = []

    def command(prefill, decode, own):
        admin_ports[:] = range(own[1], own[1] + workers)
        more = ["--workers", workers, "--admin-port", own[1], "--log-level", "warning"]
        return [*pdrelay.command(prefill, decode, own), *more]

    contestant = pdrelay._replace(name=f"pdrelay-{workers}", command=command)
    with (
        trial.engines(cores, {}) as (engines, ports),
        trial.router(cores, contestant, ports, "workers") as (router, port, _),
    ):
        trial.serves(port, contestant.name)
        until_all_serve(admin_ports)
        plan = {"connections": CONNECTIONS, "seconds": seconds}
        plan |= {"port": port, "router": router.pid, "engines": engines.pid}
        return trial.carry_out(cores, contestant, ports, plan)


def until_all_serve(admin_ports):
    deadline = time.monotonic() + START_S
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
    rows = [
        (
            run["done"] / run["seconds"],
            1000 * run["cpu"]["router"] / run["done"],
            run["cpu"]["router"] / run["seconds"],
            sum(run["cpu"].values()) / run["seconds"],
        )
        for run in runs
    ]
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def parts(seen):
    """Return the parts of the page."""
    found = {name: numbers(runs) for name, runs in seen["runs"].items()}
    rows = [
        [name, f"{rate:.0f}", f"{cost:.3f}", f"{router:.2f}", f"{whole:.2f}"]
        for name, (rate, cost, router, whole) in found.items()
    ]
    whole = found[TWO][0] / found[ONE][0]
    beside = found[TWO][0] / found[ALONE][0]
    dear = found[TWO][1] / found[ALONE][1]
    faults = sum(sum(run["faults"].values()) for runs in seen["runs"].values() for run in runs)
    return [
        "# One router, several workers\n",
        page.setting({"": seen["about"]}),
        page.paragraph(f"""
`make bench-workers`: {len(seen["runs"][ONE])} rounds of {seen["seconds"]:g} s. {CONNECTIONS} connections, 512 B
prompts, 2 tokens, streamed, two prefill and two decode engines that compute nothing, one load generator; all on the
same cores as the router. Numbers are medians of the rounds."""),
        page.table(
            [
                "",
                "requests a second",
                "router, CPU-ms a request",
                "cores of the router",
                "cores of all",
            ],
            rows,
        ),
        f"""- **{whole:.2f}**: two workers on two cores against one worker on one core, load and engines included on
  both sides; 2 would be perfect.
- **{beside:.2f}**: two workers against one on the same two cores. One worker cannot use more than one core; of the
  other one, load and engines take their part either way.
- **{dear:.2f}**: CPU of the router a request, two workers against one. With load and engines elsewhere, two workers on
  two cores serve {2 / dear:.2f} times what one serves on one.
- {faults} faults: every answer was compared byte for byte, and both legs of every request were counted.
""",
    ]


if __name__ == "__main__":
    main()
