"""What the runs of a benchmark come to: medians over rounds, ratios within them."""

import statistics

from benchmarks.router.contestants import CONTESTANTS

OURS = "pdrelay"
RUST = "vllm-router"
TOY = "toy"
DIRECT = "direct"


def request_ms(run):
    return 1e3 * run["cpu"]["router"] / run["requests"]


def token_us(run):
    return 1e6 * run["cpu"]["router"] / run["tokens"]


def rate(run):
    return run["requests"] / run["seconds"]


def other_share(run):
    return (run["cpu"]["load"] + run["cpu"]["engines"]) / run["seconds"]


def mib(which):
    return lambda run: run[which] / 2**20


def socket(which):
    return lambda run: run["sockets"][which]


def added(runs, name, what, share):
    """Return what computes the ms of a run beyond the median of those without a router."""
    base = median(runs, name, DIRECT, lambda run: run[what] and run[what][share])
    return lambda run: (
        None if base is None or run[what] is None else 1e3 * (run[what][share] - base)
    )


def good(runs, name, router):
    return [
        run
        for run in runs.get(name, {}).get(router, ())
        if "failed" not in run and run.get("requests", 1)
    ]


def present(runs, name):
    return [router for router in CONTESTANTS if good(runs, name, router)]


def median(runs, name, router, value):
    found = [each for run in good(runs, name, router) if (each := value(run)) is not None]
    if found and isinstance(found[0], str):
        return sorted(found, key=float)[len(found) // 2]
    return statistics.median(found) if found else None


def ratio(runs, name, one, other, value):
    pairs = zip(runs[name].get(one, ()), runs[name].get(other, ()), strict=False)
    found = [
        value(a) / value(b)
        for a, b in pairs
        if not {"failed"} & (a.keys() | b.keys()) and a["requests"] and b["requests"] and value(b)
    ]
    return statistics.median(found) if found else None


def difference(runs, name, one, other, value):
    """Return the median of what one has more than the other within rounds."""
    pairs = zip(runs.get(name, {}).get(one, ()), runs.get(name, {}).get(other, ()), strict=False)
    found = [value(a) - value(b) for a, b in pairs if _compares(a, b)]
    return statistics.median(found) if found else None


def _compares(*both):
    return all("failed" not in run and run["requests"] for run in both)
