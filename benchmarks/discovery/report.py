"""Writes what the simulation of a fleet has found: the numbers in JSON, and a page that computes
the rest from them.
"""

from benchmarks import page

# the router's own rhythms
RELIST_S = 300
PROBE_S = 5
WHOLE_PROBES_S = 50
INFLOW_S = 15
REREAD_S = 2
ROLLOUT_S = 1800
CONFIGMAP = 1024 * 1024  # bytes that Kubernetes allows


def parts(found):
    """Return the parts of the page."""
    made = [head, choosing, keeping, discovering, sending, probing, sharing]
    made += [readiness] if "ready" in found else []
    return [part(found) + "\n" for part in made]


def prose(text):
    return page.paragraph(text).rstrip()


def table(heads, rows):
    return page.table(heads, rows).rstrip()


def amount(value, unit="B"):
    for power, prefix in ((3, "G"), (2, "M"), (1, "k")):
        if value >= 1000**power:
            return f"{value / 1000**power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def head(found):
    fleet = found["fleet"]
    what = f"""
    `make sim-fleet` writes this page. **A simulation, not a deployment**: no cluster, no engine and no socket is
    behind it. The router's own tables, policies, reflector and reconciler run as they are, on engines and pods that
    are made up; what {fleet["routers"]} routers with {fleet["engines"]:,} engines do together is computed from that,
    and marked *computed*. Raw numbers: `fleet.json`."""
    where = """
    Numbers are processor time of the fastest try, in microseconds, unless said otherwise. Half of the engines are of
    each role; each has 8 to 12 requests, and prefill
    engines have just reported their load."""
    measured = page.setting({"": found["about"]})
    return f"# A simulated fleet\n\n{prose(what)}\n\n{measured}\n{prose(where)}"


def choosing(found):
    sizes = list(found["members"])
    most = sizes[-1]
    rate = found["fleet"]["rate"]
    tables = found["request"]["tables"]
    parts = ["## A. Choosing two engines"]
    what = """
    For one request: listing those that may serve, dropping those that do not fit, and the policy. *Two revisions* is
    the middle of a rolling update. The prompt has 4 KiB, and 5,000 sessions take turns."""
    parts.append(prose(what))
    for case, policies in found["choices"].items():
        rows = [
            [f"`{name}`", *(f"{seen[n]['whole']:,.0f}" for n in sizes)]
            for name, seen in policies.items()
        ]
        parts.append(table([f"{case}; engines:", *sizes], rows))
    usable = next(iter(found["choices"]["one revision"].values()))[most]["usable"]
    rows = []
    for name, seen in found["choices"]["one revision"].items():
        cost = seen[most]["whole"] + tables
        rows.append([f"`{name}`", f"{cost:,.0f}", f"{1e6 / cost:,.0f}", f"{rate * cost / 1e6:.1f}"])
    what = f"""
    Listing alone is {usable:,.0f} us of that at {int(most):,} engines. A request also costs {tables:.0f} us for slots,
    legs, health and counters, whatever the number of engines. With both, and without HTTP, at {int(most):,} engines
    (*computed*):"""
    parts.append(prose(what))
    title = [
        "both policies",
        "us a request",
        "requests/s that fill one core",
        f"cores for {rate:,.0f} requests/s",
    ]
    return "\n\n".join([*parts, table(title, rows)])


def keeping(found):
    rows = [
        [
            n,
            f"{m['add_and_remove']:,.0f}",
            f"{m['bytes'] / 1000:.1f} kB",
            f"{e['ms']:,.1f} ms",
            f"{e['piece_ms']:,.1f} ms",
            amount(e["bytes"]),
        ]
        for (n, m), e in zip(found["members"].items(), found["metrics"].values(), strict=True)
    ]
    title = [
        "engines",
        "add one and remove it",
        "memory per engine",
        "one scrape of `/metrics`",
        "its longest piece",
        "its size",
    ]
    return f"""## B. Keeping them

{table(title, rows)}

A scrape is made in pieces, and requests are served in between."""


def discovering(found):
    count, seen = found["fleet"]["engines"], found["discovery"]
    rows = [
        [what, f"{one.get('events', 1):,}", f"{one['busy']:.2f} s", f"{one['longest']:.1f} ms"]
        for what, one in (
            *(
                (f"LIST of {name[5:]} pods, in pages of 200", one)
                for name, one in seen.items()
                if name[:4] == "list"
            ),
            ("every pod changes in a way that means nothing", seen["quiet"]),
            (
                f"rolling update of {seen['rollout']['pods']:,} of them: come, get ready, leave, "
                f"go",
                seen["rollout"],
            ),
        )
    ]
    title = ["", "events", "processor time", "longest block of the event loop"]
    each = seen["rollout"]["busy"] / seen["rollout"]["events"]
    what = f"""
    A change of one pod costs each router {each * 1000:.2f} ms; a rolling update of all {count:,} takes
    {each * seen["rollout"]["events"] / seen["rollout"]["pods"] * count:.1f} s of every router's processor
    (*computed*)."""
    change, beside = found["change"], found["beside"]
    then = f"""
    The first choice after a change sorts all engines anew, by kinds: with {change["engines"]:,} engines
    {change["ms"]["one revision"]:.1f} ms, and {change["ms"]["two revisions"]:.1f} ms in the middle of a rollout
    (engines compared with engines: 1,300 and 12 ms; groups that were moved on in place of sorted anew: 0.7 ms, for 450
    more lines).{slices(change)}
    With {beside["engines"]:,} engines,
    {beside["requests_s"]} choices and {beside["events_s"]} pod events a second, other tasks of the event loop, such as
    a `GET /ready`, wait {beside["p99"]:.1f} ms at most in 99 of 100 cases, and {beside["most"]:.1f} ms at worst (wall
    time; no HTTP)."""
    return f"## C. Hearing of them\n\n{table(title, rows)}\n\n{prose(what)}\n\n{prose(then)}"


def slices(change):
    """Say what a change costs in a fleet of slices, as far as that was measured."""
    named = {
        case: case.split(" ") for case in change["ms"] if case.startswith(("require ", "prefer "))
    }
    some = ", ".join(
        f"{change['ms'][case]:.1f} ms ({pairing}, {n})" for case, (pairing, n) in named.items()
    )
    return f" In slices: {some}." if some else ""


def sending(found):
    routers = found["fleet"]["routers"]
    count = found["fleet"]["engines"]
    size = found["bytes"]
    update = routers * count * size["life"]
    stored = count * size["entry"]
    rows = [
        ["one pod, as an event of a watch", amount(size["pod"]), ""],
        [
            f"relist by all routers, every {RELIST_S} s",
            amount(routers * size["list"]),
            amount(routers * size["list"] / RELIST_S, "B/s"),
        ],
        [
            f"rolling update of all engines in {ROLLOUT_S // 60} min",
            amount(update),
            amount(update / ROLLOUT_S, "B/s"),
        ],
        ["an engine by hand, ConfigMap: the patch", amount(size["changes"]), ""],
        [
            f"... what all routers are then sent, with {count:,} entries",
            amount(routers * stored),
            "",
        ],
        ["an engine by hand, Redis: what all routers are then sent", amount(routers * stored), ""],
        [
            f"Redis, read again every {REREAD_S} s by all routers",
            "",
            amount(routers * stored / REREAD_S, "B/s"),
        ],
    ]
    what = f"""
    A ConfigMap holds 1 MiB: {CONFIGMAP // size["entry"]:,} engines added by hand. Engines that are pods are not in the
    store, and cause no writes."""
    title = ["", "bytes", "on the mean"]
    return f"## D. Bytes (*computed* from one pod and one entry)\n\n{table(title, rows)}\n\n{prose(what)}"


def probing(found):
    routers, count = found["fleet"]["routers"], found["fleet"]["engines"]
    probes = routers * (count / PROBE_S + 2 * min(WHOLE_PROBES_S, count / PROBE_S))
    scrapes = routers * count / 2 / INFLOW_S
    rows = [
        [
            "requests of probes",
            f"{probes:,.0f}/s",
            f"{probes / routers:,.0f}/s",
            f"{probes / count:,.0f}/s",
        ],
        [
            "reads of decode engines' `/metrics`",
            f"{scrapes:,.0f}/s",
            f"{scrapes / routers:,.0f}/s",
            f"{scrapes / count * 2:,.1f}/s",
        ],
    ]
    what = f"""
    Every router probes every engine every {PROBE_S} s (`health_check_interval_s`), asks {WHOLE_PROBES_S} engines
    a second for their models and version, and reads every decode engine's metrics every {INFLOW_S} s."""
    then = """
    That grows with routers times engines, unless the routers hear each other (`--peers`, as the chart's do): then each
    engine gets 3.1 looks a second from 100 routers, where else it gets 26 (in virtual time:
    [several-routers.md](../several-routers.md#health-checks))."""
    title = ["", f"{routers} routers, {count:,} engines", "a router", "an engine"]
    heading = "## E. Probing them (*computed* from the defaults)"
    return f"{heading}\n\n{prose(what)}\n\n{table(title, rows)}\n\n{prose(then)}"


def sharing(found):
    shared = found["shared"]
    rows = [
        [
            count,
            amount(one["bytes"]),
            f"{one['list_cpu_ms']:,.0f} ms",
            f"{one['synced_ms']['first'] / 1000:.1f} s",
            f"{one['synced_ms']['last'] / 1000:.1f} s",
            f"{one['event_ms']['p50']:.1f} ms",
            f"{one['event_ms']['p99']:.1f} ms",
        ]
        for count, one in shared.items()
        if count != "pods"
    ]
    what = f"""
    Not simulated: the discovery of several routers, each a process, at one API server that has {shared["pods"]:,} pods
    and is gone for a second, so that all routers list them anew; then pods change fifty times a second. The server
    keeps its answers ready, and shares the cores with the routers: a real one has more to do for each LIST."""
    title = [
        "routers",
        "sent by the server when it is back",
        "processor time of a router, for that LIST",
        "the first has all pods after",
        "the last after",
        "a change is seen after, median",
        "99 of 100 within",
    ]
    return f"## F. Several routers at one API server\n\n{prose(what)}\n\n{table(title, rows)}"


def readiness(found):
    seen = found["ready"]
    rows = [
        [
            what,
            port,
            f"{one['p50']:.1f} ms",
            f"{one['p99']:.1f} ms",
            f"{one['most']:.1f} ms",
            f"{one['looks']:,}",
        ]
        for what, case in (
            ("all engines answer", seen["whole"]),
            (f"{seen['lost']} of them answer nothing", seen["with_lost"]),
        )
        for port, one in ((name, case[name]) for name in ("main", "admin"))
    ]
    failed = seen["whole"]["failed"] + seen["with_lost"]["failed"]
    what = f"""
    Not simulated: a router process with its usual probes of {seen["engines"]:,} null engines, which cost next to
    nothing and are ports of one process, beside {seen["requests_s"]} streams a second ({seen["whole"]["served_s"]:.0f}
    and {seen["with_lost"]["served_s"]:.0f} were served, {failed} failed).
    The router has one core; engines, clients and the clock share another. Wall time of `GET /ready` over a kept
    connection."""
    title = ["", "port", "median", "99 of 100 within", "longest", "looks"]
    return f"## G. Asking whether it is ready\n\n{prose(what)}\n\n{table(title, rows)}"
