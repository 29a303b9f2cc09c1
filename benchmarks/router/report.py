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


def write(seen, out):
    """Write the raw numbers, the page and its picture."""
    runs = seen["runs"]
    groups = REQUESTS[:5]
    bars = {
        name: [figures.median(runs, each, name, figures.request_ms) for each in groups]
        for name in CONTESTANTS
    }
    bars = {name: values for name, values in bars.items() if any(values)}
    if bars:
        title = "CPU-milliseconds of the router a request (logarithmic)"
        wanted = [value and goals.REQUEST_MOST * value for value in bars.get(RUST, ())]
        label = f"wanted of {OURS}: {goals.REQUEST_MOST} x {RUST}"
        svg = draw(bars, groups, title, logarithmic, "{:.2g}", marks=wanted, label=label)
    picture = f"![{title}]({out.stem}.svg)\n" if bars else ""
    page.write(seen, out, [_head(seen), picture, *(part(runs) for part in PARTS)])
    if bars:
        out.with_suffix(".svg").write_text(svg)


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
    facts = seen["about"]
    machine = facts["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    rounds = f"{facts['rounds']} round{'s' * (facts['rounds'] > 1)}"
    others = "share another" if facts["apart"] else "share it, for there is only one"
    words = [
        "# The cost of the router\n",
        paragraph("""
`make bench-router` measures everything and writes this page, on an idle machine; `ONLY=short,stream200` measures some
scenarios and leaves the others as they are, `QUICK=1` makes short runs to see whether all of it works and writes to
`.pdrelay/bench`. The raw numbers are in `router.json`."""),
        paragraph(f"""
{machine["cores"]} cores, {machine["processor"].replace("_", "-")}, {machine["system"]}; {facts["date"]}; {versions}.
`{facts["command"]}`: {rounds}, in each of which every router has its turn in every scenario; numbers are medians,
ratios are medians of the ratios within rounds. A router is started for each run, alone, and has one core; two prefill
and two decode engines that compute nothing and the load generator {others}. Every answer is compared byte for byte;
the engines check every byte of the prompts, count both legs of every request and see to it that the decode leg got
the blocks of its own prompt. CPU is that of all processes of the router, user and system, from `/proc`."""),
    ]
    if facts["quick"]:
        names = ", ".join(f"`{name}`" for name in facts["quick"])
        words.append(paragraph(f"**Quick runs, too short to go by their numbers:** {names}."))
    taken = {name for runs in seen["runs"].values() for name in runs}
    words += [f"- **{name}**: {each.about}" for name, each in CONTESTANTS.items() if name in taken]
    words += [f"- {said}" for said in facts["missing"].values()]
    return "\n".join([*words, ""])


def _requests(runs):
    return _section(
        "CPU of the router, ms a request",
        "Two legs, and all the router does beside them.",
        _costs(runs, REQUESTS, figures.request_ms, "{:.3f}"),
    )


def _chunks(runs):
    return _section(
        "CPU of the router, µs a streamed token",
        "The whole request included, shared out over its tokens; `stream200` times 0.2 is ms a "
        "stream.",
        _costs(runs, STREAMS, figures.token_us, "{:.1f}"),
    )


def _rates(runs):
    return _section(
        "Requests a second through one core",
        """As seen by the clients. Where the router costs little, the core of the engines and the load generator is the
limit; then its share of that core's time is near 1, and 1,000 divided by the CPU-ms above says more.""",
        _rate_table(runs),
    )


def _rate_table(runs):
    rows = []
    for name in REQUESTS:
        if not (present := figures.present(runs, name)):
            continue
        cells = []
        for router in CONTESTANTS:
            rate = figures.median(runs, name, router, figures.rate) if router in present else None
            other = (
                figures.median(runs, name, router, figures.other_share)
                if router in present
                else None
            )
            cells.append("" if rate is None else f"{rate:,.0f} ({other:.2f})")
        rows.append([f"`{name}`", *cells])
    heads = ["", *(f"{name} (share of the other core)" for name in CONTESTANTS)]
    return table(heads, rows) if rows else ""


def _latencies(runs):
    rows = []
    for name in LATENCIES:
        for router in figures.present(runs, name):
            first = [
                figures.median(runs, name, router, figures.added(runs, name, "first", share))
                for share in ("p50", "p99")
            ]
            late = [
                figures.median(runs, name, router, figures.added(runs, name, "late", share))
                for share in ("p50", "p99")
            ]
            gaps = [
                figures.median(runs, name, router, figures.added(runs, name, "gaps", share))
                for share in ("p50", "p99")
            ]
            rows.append([f"`{name}`", router, *(_ms(each) for each in (*first, *late, *gaps))])
    heads = ["", "router", "TTFT p50", "p99", "token p50", "p99", "between tokens p50", "p99"]
    return _section(
        "Delay that a router adds, ms",
        """Percentiles through the router minus those (the medians of all rounds) of the same clients connected to a
decode engine. TTFT: from sending the request to the first byte of its answer (the prompt takes an engine the same time
with and without a prefill leg). Token: from the instant of a step, which all streams have in common, to
the token at its client. Between tokens: from one to the next.""",
        table(heads, rows) if rows else "",
    )


def _memory(runs):
    rows = []
    for name in ("short", "prompt256k", "streams1000", "hangups"):
        for router in figures.present(runs, name):
            sockets = [
                figures.median(runs, name, router, figures.socket(which))
                for which in ("before", "after")
            ]
            cells = [
                figures.median(runs, name, router, figures.mib(which)) for which in ("rss", "peak")
            ]
            rows.append([f"`{name}`", router, *(_whole(each) for each in (*cells, *sockets))])
    return _section(
        "Memory and sockets",
        """Resident MiB at the end of the load, and at its most; sockets before the load, and after all clients have
left (in `streams1000` and `hangups` up to 6 s after, which is time enough to close idle connections to engines).""",
        table(["", "router", "RSS, MiB", "at most", "sockets before", "after"], rows)
        if rows
        else "",
    )


def _idle(runs):
    rows = [
        [
            router,
            figures.median(runs, IDLE, router, lambda run: f"{run['start']:.2f}"),
            figures.median(
                runs,
                IDLE,
                router,
                lambda run: f"{run['start_cpu']:.2f}" if "start_cpu" in run else None,
            )
            or "",
            figures.median(runs, IDLE, router, lambda run: f"{run['cores']:.4f}"),
            figures.median(runs, IDLE, router, lambda run: f"{run['rss'] / 2**20:.0f}"),
        ]
        for router in figures.present(runs, IDLE)
    ]
    return _section(
        "Idle",
        """Start-up is from starting the process, with its bytecode there, to the first connection it accepts; then it
has nothing to do.""",
        table(["router", "start-up, s", "of the processor, s", "cores", "RSS, MiB"], rows)
        if rows
        else "",
    )


def _own(runs):
    rows = []
    for name in SCENARIOS:
        if DIRECT in runs.get(name, {}):
            own = [
                figures.median(
                    runs, name, DIRECT, lambda run, who=who: 1e6 * run["cpu"][who] / run["requests"]
                )
                for who in ("load", "engines")
            ]
            through = [
                figures.median(
                    runs, name, OURS, lambda run: 1e6 * run["cpu"]["engines"] / run["requests"]
                )
                if OURS in figures.present(runs, name)
                else None
            ]
            rows.append(
                [f"`{name}`", SCENARIOS[name].about, *(_whole(each) for each in (*own, *through))]
            )
    heads = ["", "what is asked", "load generator", "engines, one leg", f"engines behind {OURS}"]
    return _section(
        "The scenarios, and what measuring costs, µs of CPU a request",
        "Load generator and engines without a router: one leg. None of this is in the numbers "
        "above.",
        table(heads, rows) if rows else "",
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
    return _section("Faults", words, "\n".join([*said, ""]) if said else " ")


def _goals(runs):
    rows = [
        [each.what, each.where, each.found, each.wanted, "yes" if each.reached else "**no**"]
        for each in goals.of(runs)
    ]
    return _section(
        "Goals",
        """Ratios are medians of the ratios within rounds, differences of the differences within rounds. A goal that
needs a router or a scenario which has not been measured is left out.""",
        table(["goal", "scenario", "measured", "wanted", "reached"], rows) if rows else "",
    )


PARTS = (_goals, _requests, _chunks, _rates, _latencies, _memory, _idle, _own, _faults)


def _costs(runs, names, value, form):
    rows = []
    for name in names:
        present = figures.present(runs, name)
        if not present:
            continue
        cells = [
            figures.median(runs, name, each, value) if each in present else None
            for each in CONTESTANTS
        ]
        ratios = [figures.ratio(runs, name, *pair, value) for pair in ((OURS, RUST), (TOY, OURS))]
        rows.append(
            [
                f"`{name}`",
                *("" if cell is None else form.format(cell) for cell in cells),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    return table(["", *CONTESTANTS, f"{OURS} / {RUST}", f"{TOY} / {OURS}"], rows) if rows else ""


def _section(title, words, rows):
    return f"## {title}\n\n{paragraph(words)}\n{rows}".rstrip() + "\n" if rows else ""


def _ms(value):
    return "" if value is None else f"{value:.2f}"


def _whole(value):
    return "" if value is None else f"{value:,.0f}"
