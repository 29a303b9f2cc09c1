"""What a router is like after a long time: 1,000 streams at once three times, and half an hour of
everything.

``make soak`` writes docs/benchmarks/soak.json and a part of router.md there. One router serves all
of it, in front of the null engines, which compare every prompt and count every leg; the load
generator compares every answer.
"""

import contextlib
import statistics
import sys
import time
from types import SimpleNamespace

from benchmarks import page
from benchmarks.router import trial
from benchmarks.router.contestants import CONTESTANTS
from support import proc

STREAMS, STREAM_S, MINUTES, ROUNDS = 1000, 60.0, 30.0, 3
QUICK_STREAMS, QUICK_STREAM_S, QUICK_MINUTES = 50, 2.0, 0.1
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


def main():
    parser = page.parser_of(__doc__, "few streams, and the mix once")
    parser.add_argument("--minutes", type=float, help=f"of everything ({MINUTES:g})")
    args = parser.parse_args()
    page.end_as_by_ctrl_c()
    streams, stream_s = (QUICK_STREAMS, QUICK_STREAM_S) if args.quick else (STREAMS, STREAM_S)
    minutes = args.minutes or (QUICK_MINUTES if args.quick else MINUTES)
    seen = {"about": page.about(), "streams": streams, "seconds": stream_s, "minutes": minutes}
    with running() as soak:
        plan = {"connections": streams, "most": streams, "tokens": round(stream_s / STEP_S)}
        seen["rounds"] = [soak.carry_out(plan) for _ in range(ROUNDS)]
        print(seen["rounds"], flush=True)
        seen["mixed"] = mixed(soak, minutes)
    seen |= {"faults": soak.faults, "requests": soak.requests}
    out = page.out_of(args, "soak")
    page.write(seen, out, parts)
    page.show(out)
    return 1 if soak.faults else 0


@contextlib.contextmanager
def running():
    """Start the engines and a router."""
    cores = trial.apart()
    contestant = CONTESTANTS["pdrelay"]
    with (
        trial.engines(cores, {"step_s": STEP_S}) as (engines, ports),
        trial.router(cores, contestant, ports, "soak") as (router, port, _),
    ):
        trial.serves(port, "pdrelay")
        yield Soak(cores, ports, {"port": port, "router": router.pid, "engines": engines.pid})


class Soak:
    """A router under one load after the other, and what was seen of it."""

    def __init__(self, cores, ports, processes):
        self._cores = cores
        self._ports = ports
        self._plan = processes | {"step_s": STEP_S, "warm": 0, "patience": PATIENCE_S}
        self.faults = {}
        self.requests = 0

    def carry_out(self, plan):
        """Run one load and return the bytes and sockets of the router after it."""
        contestant = CONTESTANTS["pdrelay"]
        found = trial.carry_out(self._cores, contestant, self._ports, self._plan | plan)
        for kind, number in found["faults"].items():
            self.faults[kind] = self.faults.get(kind, 0) + number
        self.requests += found["requests"]
        return {
            "rss": found["rss"],
            "sockets": found["sockets"]["after"],
            "requests": found["requests"],
        }

    def footprint(self):
        who = SimpleNamespace(pid=self._plan["router"])
        return {"rss": proc.memory(who), "sockets": proc.sockets(who), "threads": proc.threads(who)}


def mixed(soak, minutes):
    """Go through the mix until the time is over; return the footprint after each time."""
    end = time.monotonic() + minutes * 60
    found = []
    while time.monotonic() < end:
        for plan in MIX:
            soak.carry_out(plan)
        found.append(soak.footprint() | {"requests": soak.requests})
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


def parts(seen):
    """Return the parts of the page."""
    mib = 1 / (1 << 20)
    rounds = [
        (number, f"{one['requests']:,}", f"{one['rss'] * mib:.1f}", one["sockets"])
        for number, one in enumerate(seen["rounds"], 1)
    ]
    mixed = [
        (f"{one['requests']:,}", f"{one['rss'] * mib:.1f}", one["sockets"], one["threads"])
        for one in seen["mixed"][:: max(1, len(seen["mixed"]) // 12)]
    ]
    return [
        "# The router after a long time\n",
        page.setting({"": seen["about"]}),
        page.paragraph("""`make soak`: one router, two prefill and two decode engines that compute nothing; every answer
was compared byte by byte, and both legs of every request were counted."""),
        f"## {seen['streams']:,} streams, each {seen['seconds']:g} s long, {ROUNDS} times\n",
        page.table(["round", "answers", "RSS after it, MiB", "sockets after it"], rounds),
        f"## {seen['minutes']:g} minutes of everything\n",
        page.paragraph("""Streams and whole answers, completions and chats, prompts of 0.5, 32 and 256 KiB, and clients
that leave."""),
        page.table(["after, requests", "RSS, MiB", "sockets", "threads"], mixed),
        page.paragraph(f"""From the second quarter of that time to the last, memory grew by
{growth(seen["mixed"]) * mib:.1f} MiB. Faults of any kind: {seen["faults"] or "none"}."""),
    ]


if __name__ == "__main__":
    sys.exit(main())
