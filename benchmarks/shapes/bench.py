"""What it costs to move KV between engines of several shapes, beside copying as many bytes.

``make bench-shapes`` writes docs/benchmarks/shapes.json and a part of connector.md there. Each way
that bytes can take has two processes of its own; all of them live at once and take turns.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

from benchmarks import page
from benchmarks.shapes import report
from benchmarks.shapes.cases import CASES, LENGTHS

# environments
WAYS = {"Shared memory, as NIXL chooses by itself": {}, "TCP over loopback": {"UCX_TLS": "tcp"}}
ROUNDS, QUICK_ROUNDS = 7, 1


def main():
    args = page.parser_of(__doc__, "one round of short prompts").parse_args()
    page.end_as_by_ctrl_c()
    about = page.about("nixl")
    lengths, rounds = (LENGTHS[:1], QUICK_ROUNDS) if args.quick else (LENGTHS, ROUNDS)
    with ExitStack() as stack:
        readers = {way: stack.enter_context(running(env)) for way, env in WAYS.items()}
        seen = measured(readers, lengths, rounds)
    out = page.out_of(args, "shapes")
    page.write({"about": about, "rounds": rounds, **seen}, out, report.parts)
    page.show(out)


def measured(readers, lengths, rounds):
    """Measure everything once a round, but what takes long more rarely."""
    moves = {
        way: {str(n): {case: {"merged": [], "unmerged": []} for case in CASES} for n in lengths}
        for way in readers
    }
    copies = {way: {str(n): [] for n in lengths} for way in readers}
    turns = [(n, case, way) for n in lengths for case in CASES for way in readers]
    can_merge = {
        turn: readers[turn[2]]("check", case=turn[1], tokens=turn[0])["can_merge"] for turn in turns
    }
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
            return json.loads(
                reader.stdout.readline() or sys.exit("the process that reads has ended")
            )

        yield ask


@contextmanager
def started(reads, env):
    env = {
        **os.environ,
        "PYTHONPATH": str(page.ROOT),
        "UCX_LOG_LEVEL": "fatal",
        "NIXL_LOG_LEVEL": "WARN",
        **env,
    }
    command = [sys.executable, "-m", "benchmarks.shapes.side", str(reads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    main()
