"""What a router is like after a long time: 1,000 streams at once three times, and half an hour of
everything.

``make soak`` writes docs/benchmarks/soak.json and a part of router.md there. One router serves all
of it, in front of the null engines, which compare every prompt and count every leg; the load
generator compares every answer.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks import page  # noqa: E402 (the path is made above)
from benchmarks.router import trial  # noqa: E402 (the path is made above)
from benchmarks.router.contestants import CONTESTANTS  # noqa: E402
from support import proc  # noqa: E402

STEP_S = 0.25  # between two tokens of a stream
PATIENCE_S = 8.0  # for idle connections to engines to be closed
# One after the other, again and again. Streams take a token every STEP_S.
MIX = (
    {"connections": 16, "seconds": 5.0, "tokens": 4},
    {"connections": 8, "seconds": 5.0, "tokens": 4, "chat": True, "stream": False},
    {"connections": 64, "most": 64, "tokens": 20},
    {"connections": 64, "most": 96, "tokens": 12, "hang_after": 3},
    {"connections": 8, "seconds": 5.0, "tokens": 4, "prompt": 32 << 10},
    {"connections": 4, "seconds": 3.0, "tokens": 4, "prompt": 256 << 10},
)


class Runner:
    """A router, its engines, and what was seen of it."""

    def __init__(self, cores, engines, router, ports, port):
        self.cores = cores
        self.engines = engines
        self.router = router
        self.ports = ports
        self.port = port
        self.faults = {}
        self.requests = 0

    def carry_out(self, plan):
        """Run one load and return the bytes and sockets of the router after it."""
        before = trial.get(self.ports["decode"][0], "/bench/counts")
        base = {
            "port": self.port,
            "router": self.router.pid,
            "engines": self.engines.pid,
            "step_s": STEP_S,
            "warm": 0,
        }
        found = trial.carry_out(self.cores, base | {"patience": PATIENCE_S} | plan)
        found["legs"] = trial.legs(self.ports["decode"][0], before)
        trial.check(found, CONTESTANTS["pdrelay"])
        for kind, number in found["faults"].items():
            self.faults[kind] = self.faults.get(kind, 0) + number
        self.requests += found["requests"]
        return {
            "rss": found["rss"],
            "sockets": found["sockets"]["after"],
            "requests": found["requests"],
        }

    def footprint(self):
        who = SimpleNamespace(pid=self.router.pid)
        return {"rss": proc.memory(who), "sockets": proc.sockets(who), "threads": proc.threads(who)}


@contextlib.contextmanager
def running(name, router="plain"):
    """Start the engines and a router."""
    cores = trial.Cores()
    with contextlib.ExitStack() as stack:
        process, ports = stack.enter_context(trial.engines(cores, {"step_s": STEP_S}))
        child, port, _ = stack.enter_context(trial.router(cores, CONTESTANTS[router], ports, name))
        trial.serves(port, "pdrelay")
        yield Runner(cores, process, child, ports, port)


def rounds(runner, *, streams, seconds, count):
    """Hold so many streams for so long, a few times; return the footprint after each."""
    plan = {"connections": streams, "most": streams, "tokens": round(seconds / STEP_S)}
    return [runner.carry_out(plan) for _ in range(count)]


def mixed(runner, minutes):
    """Go through the mix until the time is over; return the footprint after each time."""
    end = time.monotonic() + minutes * 60
    found = []
    while time.monotonic() < end:
        for plan in MIX:
            runner.carry_out(plan)
        found.append(runner.footprint() | {"requests": runner.requests})
        print(f"{len(found)}: {found[-1]}", flush=True)
    return found


def growth(found):
    """Return by how many bytes the last quarter is larger than the second, in the median: the first
    warms up.
    """
    quarter = max(1, len(found) // 4)
    early = found[quarter : 2 * quarter] or found[:1]
    late = found[-quarter:]
    return statistics.median(one["rss"] for one in late) - statistics.median(
        one["rss"] for one in early
    )


def report(found):
    """Return the page."""
    mib = 1 / (1 << 20)
    rounds = [
        (number, f"{one['requests']:,}", f"{one['rss'] * mib:.1f}", one["sockets"])
        for number, one in enumerate(found["rounds"], 1)
    ]
    some = found["mixed"][:: max(1, len(found["mixed"]) // 12)]
    mixed = [
        (f"{one['requests']:,}", f"{one['rss'] * mib:.1f}", one["sockets"], one["threads"])
        for one in some
    ]
    about = f"""`make soak`, {found["date"]}; {found["python"]}. One router, two prefill and two decode engines that
compute nothing; every answer was compared byte by byte, and both legs of every request were counted."""
    grown = f"""From the second quarter of that time to the last, memory grew by {found["growth"] * mib:.1f} MiB.
Faults of any kind: {found["faults"] or "none"}."""
    parts = [
        "# The router after a long time\n",
        page.paragraph(about),
        f"## {found['streams']:,} streams, each {found['seconds']:g} s long, "
        f"{len(found['rounds'])} times\n",
        page.table(["round", "answers", "RSS after it, MiB", "sockets after it"], rounds),
        f"## {found['minutes']:g} minutes of everything\n",
        "Streams and whole answers, completions and chats, prompts of 0.5, 32 and 256 KiB, and "
        "clients that leave.\n",
        page.table(["after, requests", "RSS, MiB", "sockets", "threads"], mixed),
        page.paragraph(grown),
    ]
    return "\n".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=page.PAGES / "soak.json")
    args = parser.parse_args()
    found = {
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
        "python": f"Python {sys.version.split()[0]}",
    }
    found |= {"streams": args.streams, "seconds": args.seconds, "minutes": args.minutes}
    with running("soak", "pdrelay") as runner:
        found["rounds"] = rounds(runner, streams=args.streams, seconds=args.seconds, count=3)
        print(found["rounds"], flush=True)
        found["mixed"] = mixed(runner, args.minutes)
        found |= {
            "growth": growth(found["mixed"]),
            "faults": runner.faults,
            "requests": runner.requests,
        }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    page.write_page(args.out, report(found))
    return 1 if runner.faults else 0


if __name__ == "__main__":
    sys.exit(main())
