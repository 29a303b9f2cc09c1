"""What it costs to move KV between engines of several shapes, beside copying as many bytes.

``make bench-shapes`` writes docs/benchmarks/shapes.md and .json. Each way that bytes can take has two processes of its
own; all of them live at once and take turns.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shapes import report
from benchmarks.shapes.cases import CASES, LENGTHS

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
WAYS = {"Shared memory, as NIXL chooses by itself": {}, "TCP over loopback": {"UCX_TLS": "tcp"}}  # environments
ROUNDS, QUICK_ROUNDS = 7, 1


def main():
    args = arguments()
    start = time.monotonic()
    lengths, rounds = (LENGTHS[:1], QUICK_ROUNDS) if args.quick else (LENGTHS, ROUNDS)
    with ExitStack() as stack:
        readers = {way: stack.enter_context(running(env)) for way, env in WAYS.items()}
        seen = measured(readers, lengths, rounds)
    machine = {"cores": os.cpu_count(), "processor": platform.machine().replace("_", "-"), "system": platform.system()}
    report.write({"machine": machine, "rounds": rounds, **seen}, args.out)
    print(args.out.with_suffix(".md").read_text())
    print(f"{time.monotonic() - start:.0f} s; written to {args.out.with_suffix('.*')}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of short prompts: does it work?")
    parser.add_argument("--out", type=Path, help="the JSON file; .md is written beside it")
    args = parser.parse_args()
    args.out = args.out or ROOT / (".xpyd/bench/shapes.json" if args.quick else "docs/benchmarks/shapes.json")
    return args


def measured(readers, lengths, rounds):
    """Measure everything once a round, but what takes long more rarely."""
    moves = {
        way: {str(n): {case: {"merged": [], "unmerged": []} for case in CASES} for n in lengths} for way in readers
    }
    copies = {way: {str(n): [] for n in lengths} for way in readers}
    turns = [(n, case, way) for n in lengths for case in CASES for way in readers]
    can_merge = {turn: readers[turn[2]]("check", case=turn[1], tokens=turn[0])["can_merge"] for turn in turns}
    for round_ in range(rounds):
        print(f"round {round_ + 1} of {rounds}", file=sys.stderr)
        for way, ask in readers.items():
            for n in lengths:
                copies[way][str(n)].append(ask("copy", tokens=n)["seconds"])
        for turn in turns:
            n, case, way = turn
            if round_ % CASES[case].every:
                continue
            found = moves[way][str(n)][case]
            found["merged"].append(readers[way]("move", case=case, tokens=n))
            if can_merge[turn]:
                found["unmerged"].append(readers[way]("move_unmerged", case=case, tokens=n))
    return {"moves": moves, "copies": copies}


@contextmanager
def running(env):
    """Start two processes, and return what asks the one that reads."""
    with started(0, env) as source, started(1, env) as reader:
        reader.stdin.write(source.stdout.readline())
        reader.stdin.flush()
        reader.stdout.readline()

        def ask(do, **fields):
            reader.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            reader.stdin.flush()
            return json.loads(reader.stdout.readline() or sys.exit("the process that reads has ended"))

        yield ask


@contextmanager
def started(reads, env):
    env = {**os.environ, "PYTHONPATH": str(TESTS), "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "WARN", **env}
    command = [sys.executable, "-m", "benchmarks.shapes.side", str(reads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    main()
