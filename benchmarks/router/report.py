"""docs/benchmarks/router.md from the raw numbers. What was never measured is left out."""

from benchmarks import page
from benchmarks.chart import draw, logarithmic
from benchmarks.page import paragraph, table
from benchmarks.router import figures, goals
from benchmarks.router.contestants import CONTESTANTS
from benchmarks.router.figures import DIRECT, OURS, RUST, TOY
from benchmarks.router.scenarios import IDLE, SCENARIOS

REQUESTS = ("short", "nonstream", "chat", "prompt32k", "prompt256k", "push")
STREAMS = ("stream200", "alone200", "step256", "streams1000", "hangups")
LATENCIES = (
    "burst32",
    "ttft32",
    "burst256",
    "ttft256",
    "stream200",
    "alone200",
    "step256",
    "streams1000",
)


TITLE = "CPU-milliseconds of the router a request (logarithmic)"


def write(seen, out):
    """Write the raw numbers, the page and its picture."""
    page.write(seen, out, parts, picture)


def parts(seen):
    """Return the parts of the page."""
    return [_head(seen), f"![{TITLE}](router.svg)\n", *(part(seen["runs"]) for part in PARTS)]


def picture(seen):
    """Return the picture of the page, if there is anything to draw."""
    groups = REQUESTS[:5]
    bars = {
        name: [figures.median(seen["runs"], each, name, figures.request_ms) for each in groups]
        for name in CONTESTANTS
    }
    bars = {name: values for name, values in bars.items() if any(values)}
    wanted = [value and goals.REQUEST_MOST * value for value in bars.get(RUST, ())]
    label = f"wanted of {OURS}: {goals.REQUEST_MOST} x {RUST}"
    return bars and draw(bars, groups, TITLE, logarithmic, "{:.2g}", marks=wanted, label=label)


def line(found):
    """Return one run in a few words, for whoever waits."""
    if "failed" in found:
        return f"FAILED: {found['failed']}"
    if "start" in found:
        return f"{found['start']:.2f} s to start, {found['cores']:.4f} cores, {found['rss'] / 2**20:.0f} MiB"
    cpu, count = found["cpu"], found["requests"]
    if not count:
        return f"NO ANSWER: {found['faults']} {found['said'][:1]}"
    used = ", ".join(f"{name} {1e3 * seconds / count:.3f} ms" for name, seconds in cpu.items())
    odd = f" FAULTS: {found['faults']} {found['said'][:1]}" if found["faults"] else ""
    return f"{found['requests']} requests, {found['requests'] / found['seconds']:.0f}/s; a request: {used}{odd}"


def _head(seen):
    taken = {name for runs in seen["runs"].values() for name in runs}
    names = [f"- **{name}**: {each.about}" for name, each in CONTESTANTS.items() if name in taken]
    words = [
        "# The cost of the router\n",
        paragraph("""
`make bench-router` measures everything and writes this page, on an idle machine; `ONLY=short,stream200` measures some
scenarios and leaves the others as they are, `QUICK=1` makes short runs to see whether all of it works and writes to
`.pdrelay/bench`. The raw numbers are in `router.json`."""),
        page.setting(seen["about"]),
        paragraph("""
In each round every router has its turn in every scenario; numbers are medians, ratios are medians of the ratios within
rounds. A router is started for each run, alone, and has one core; two prefill
and two decode engines that compute nothing and the load generator share another. Every answer is compared byte for
byte; the engines check every byte of the prompts, count both legs of every request and see to it that the decode leg
got the blocks of its own prompt. CPU is that of all processes of the router, user and system, from `/proc`."""),
        *names,
        *(f"- {said}" for said in seen["missing"].values()),
        "",
    ]
    return "\n".join(words)


def _requests(runs):
    title = "CPU of the router, ms a request"
    words = "Two legs, and all the router does beside them."
    return _costs(title, words, runs, REQUESTS, figures.request_ms, "{:.3f}")


def _chunks(runs):
    title = "CPU of the router, µs a streamed token"
    words = "The whole request included, shared out over its tokens; `stream200` times 0.2 is ms a stream."
    return _costs(title, words, runs, STREAMS, figures.token_us, "{:.1f}")


def _rates(runs):
    rows = []
    for name in REQUESTS:
        cells = []
        for router in CONTESTANTS:
            rate = figures.median(runs, name, router, figures.rate)
            other = figures.median(runs, name, router, figures.other_share)
            cells.append("" if rate is None else f"{rate:,.0f} ({other:.2f})")
        rows += [[f"`{name}`", *cells]] if any(cells) else []
    return _section(
        "Requests a second through one core",
        """As seen by the clients. Where the router costs little, the core of the engines and the load generator is the
limit; then its share of that core's time is near 1, and 1,000 divided by the CPU-ms above says more.""",
        ["", *(f"{name} (share of the other core)" for name in CONTESTANTS)],
        rows,
    )


def _latencies(runs):
    rows = [
        [
            f"`{name}`",
            router,
            *(
                _number(figures.median(runs, name, router, figures.added(runs, name, what, share)))
                for what in ("first", "late", "gaps")
                for share in ("p50", "p99")
            ),
        ]
        for name in LATENCIES
        for router in figures.present(runs, name)
    ]
    return _section(
        "Delay that a router adds, ms",
        """Percentiles through the router minus those (the medians of all rounds) of the same clients connected to a
decode engine. TTFT: from sending the request to the first byte of its answer (the prompt takes an engine the same time
with and without a prefill leg). Token: from the instant of a step, which all streams have in common, to
the token at its client. Between tokens: from one to the next.""",
        ["", "router", "TTFT p50", "p99", "token p50", "p99", "between tokens p50", "p99"],
        rows,
    )


def _memory(runs):
    values = (
        figures.mib("rss"), figures.mib("peak"), figures.socket("before"), figures.socket("after"),
    )  # fmt: skip
    rows = [
        [
            f"`{name}`",
            router,
            *(_number(figures.median(runs, name, router, value), "{:,.0f}") for value in values),
        ]
        for name in ("short", "prompt256k", "streams1000", "hangups")
        for router in figures.present(runs, name)
    ]
    return _section(
        "Memory and sockets",
        """Resident MiB at the end of the load, and at its most; sockets before the load, and after all clients have
left (in `streams1000` and `hangups` up to 6 s after, which is time enough to close idle connections to engines).""",
        ["", "router", "RSS, MiB", "at most", "sockets before", "after"],
        rows,
    )


def _idle(runs):
    values = (
        (lambda run: run["start"], "{:.2f}"),
        (lambda run: run.get("start_cpu"), "{:.2f}"),
        (lambda run: run["cores"], "{:.4f}"),
        (figures.mib("rss"), "{:.0f}"),
    )
    rows = [
        [
            router,
            *(_number(figures.median(runs, IDLE, router, value), form) for value, form in values),
        ]
        for router in figures.present(runs, IDLE)
    ]
    return _section(
        "Idle",
        """Start-up is from starting the process, with its bytecode there, to the first connection it accepts; then it
has nothing to do.""",
        ["router", "start-up, s", "of the processor, s", "cores", "RSS, MiB"],
        rows,
    )


def _own(runs):
    def used(who):
        return lambda run: 1e6 * run["cpu"][who] / run["requests"]

    columns = ((DIRECT, used("load")), (DIRECT, used("engines")), (OURS, used("engines")))
    rows = [
        [
            f"`{name}`",
            scenario.about,
            *(_number(figures.median(runs, name, *column), "{:,.0f}") for column in columns),
        ]
        for name, scenario in SCENARIOS.items()
        if DIRECT in runs.get(name, {})
    ]
    return _section(
        "The scenarios, and what measuring costs, µs of CPU a request",
        """Load generator and engines without a router: one leg. None of this is in the numbers above.""",
        ["", "what is asked", "load generator", "engines, one leg", f"engines behind {OURS}"],
        rows,
    )


def _faults(runs):
    said = []
    for name, routers in runs.items():
        for router, found in routers.items():
            bad = [run for run in found if run.get("faults") or run.get("failed")]
            if bad:
                why = bad[0].get("failed") or f"{bad[0]['faults']}; {' '.join(bad[0]['said'][:1])}"
                why = " ".join(why.replace("`", "'").split())[:300]
                said.append(f"- `{name}`, {router}, {len(bad)} of {len(found)} runs: {why}")
    done = sum(len(found) for routers in runs.values() for found in routers.values())
    total = sum(
        run.get("requests", 0)
        for routers in runs.values()
        for found in routers.values()
        for run in found
    )
    words = f"{total:,} requests in {done} runs; " + (
        "not as they must be:" if said else "every answer and every leg was as it must be."
    )
    return f"## Faults\n\n{paragraph(words)}\n" + "\n".join([*said, ""])


def _goals(runs):
    rows = [
        [each.what, each.where, each.found, each.wanted, "yes" if each.reached else "**no**"]
        for each in goals.of(runs)
    ]
    return _section(
        "Goals",
        """Ratios are medians of the ratios within rounds, differences of the differences within rounds. A goal that
needs a router or a scenario which has not been measured is left out.""",
        ["goal", "scenario", "measured", "wanted", "reached"],
        rows,
    )


PARTS = (_goals, _requests, _chunks, _rates, _latencies, _memory, _idle, _own, _faults)


def _costs(title, words, runs, names, value, form):
    heads = ["", *CONTESTANTS, f"{OURS} / {RUST}", f"{TOY} / {OURS}"]
    rows = []
    for name in names:
        cells = [_number(figures.median(runs, name, each, value), form) for each in CONTESTANTS]
        ratios = [figures.ratio(runs, name, pair, value) for pair in ((OURS, RUST), (TOY, OURS))]
        rows += [[f"`{name}`", *cells, *map(_number, ratios)]] if any(cells) else []
    return _section(title, words, heads, rows)


def _section(title, words, heads, rows):
    return f"## {title}\n\n{paragraph(words)}\n{table(heads, rows)}" if rows else ""


def _number(value, form="{:.2f}"):
    return "" if value is None else form.format(value)
