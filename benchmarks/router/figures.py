"""What the runs of a benchmark come to: medians over rounds, ratios within them."""

import operator
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
    return [run for run in runs.get(name, {}).get(router, ()) if _is_good(run)]


def _is_good(run):
    return "failed" not in run and run.get("requests", 1) > 0


def present(runs, name):
    return [router for router in CONTESTANTS if good(runs, name, router)]


def median(runs, name, router, value):
    """Return the median over rounds; None: nothing was measured."""
    found = [each for run in good(runs, name, router) if (each := value(run)) is not None]
    return statistics.median(found) if found else None


def within_rounds(runs, name, routers, value, compare):
    """Return the median of what two routers come to in the same round; None: there is no round of
    both.
    """
    both = (runs.get(name, {}).get(router, ()) for router in routers)
    found = [
        compare(*map(value, pair)) for pair in zip(*both, strict=False) if all(map(_is_good, pair))
    ]
    return statistics.median(found) if found else None


def ratio(runs, name, routers, value):
    return within_rounds(runs, name, routers, value, operator.truediv)
