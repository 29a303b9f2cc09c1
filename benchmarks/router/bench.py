"""What the router costs, beside other routers, in front of engines that cost almost nothing.

``make bench-router`` writes docs/benchmarks/router.md, .json and .svg. Routers run one at a time
and take turns, each on a core of its own; engines and the load generator share another.
"""

import json
import resource
import subprocess
import sys

from benchmarks import page
from benchmarks.router import report, trial
from benchmarks.router.contestants import CONTESTANTS, PACKAGES, RUST_ROUTER, Missing, prepare
from benchmarks.router.scenarios import IDLE, SCENARIOS

DIRECT = "direct"  # no router: what the load generator sees of an engine
ROUNDS, QUICK_ROUNDS = 3, 1
IDLE_S, QUICK_IDLE_S = 10.0, 3.0


def main():
    args = arguments()
    page.end_as_by_ctrl_c()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # children inherit it
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    missing = {name: said for name in args.routers if (said := lacking(name))}
    routers = [name for name in args.routers if name not in missing]
    cores = trial.apart()
    seen = (
        json.loads(args.out.read_text())
        if args.only and args.out.exists()
        else {"about": {}, "runs": {}}
    )
    seen["missing"] = missing
    for name in args.only or [*SCENARIOS, IDLE]:
        seen["runs"][name] = measured(cores, routers, name, args)
        seen["about"][name] = about()
        report.write(seen, args.out)
    page.show(args.out)


def arguments():
    parser = page.parser_of(__doc__, "short runs")
    known = [*SCENARIOS, IDLE]
    listed = lambda text: text.replace(",", " ").split()  # noqa: E731
    parser.add_argument(
        "--only", type=listed, default=[], help=f"scenarios, with commas: {','.join(known)}"
    )
    parser.add_argument(
        "--routers", type=listed, default=[*CONTESTANTS], help=",".join(CONTESTANTS)
    )
    parser.add_argument(
        "--rounds", type=int, help=f"turns of every router ({ROUNDS}; quick: {QUICK_ROUNDS})"
    )
    args = parser.parse_args()
    for what, given, there in (
        ("scenario", args.only, known),
        ("router", args.routers, [*CONTESTANTS]),
    ):
        if odd := [name for name in given if name not in there]:
            parser.error(f"there is no {what} {odd[0]!r}: choose from {', '.join(there)}")
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    args.out = page.out_of(args, "router")
    return args


def lacking(name):
    """Install what a router needs; return why it cannot take part, or nothing."""
    try:
        prepare(name)
    except Missing as exc:
        print(exc, file=sys.stderr)
        return str(exc)
    return None


def measured(cores, routers, name, args):
    """Let the routers take turns in one scenario: A B C A B C."""
    takers = (
        routers
        if name == IDLE
        else [DIRECT, *(each for each in routers if each in SCENARIOS[name].routers)]
    )
    runs = {each: [] for each in takers}
    for round_ in range(args.rounds):
        for each in takers:
            found = one(cores, each, name, quick=args.quick)
            runs[each].append(found)
            print(
                f"{name} {round_ + 1}/{args.rounds} {each}: {report.line(found)}", file=sys.stderr
            )
    return runs


def one(cores, router, name, *, quick):
    """Measure one router once; a run that comes to nothing says why."""
    contestant = CONTESTANTS.get(router)
    try:
        if name == IDLE:
            return trial.idle(cores, contestant, QUICK_IDLE_S if quick else IDLE_S)
        scenario = SCENARIOS[name]
        plan = {} if "most" in scenario.load else {"seconds": scenario.seconds}
        plan |= scenario.load | (scenario.quick if quick else {})
        return trial.run(cores, contestant, name, plan, scenario.engines)
    except (trial.Failed, subprocess.SubprocessError) as exc:
        return {"failed": str(exc)}


def about():
    """Return what a scenario was measured with."""
    found = page.about(*PACKAGES)
    name, _, number = RUST_ROUTER.partition("==")
    found["versions"][name] = number
    return found


if __name__ == "__main__":
    main()
