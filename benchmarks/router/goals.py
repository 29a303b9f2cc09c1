"""What the router has set out to reach, and whether it has."""

import operator
from typing import NamedTuple

from benchmarks.router.figures import (
    DIRECT,
    OURS,
    RUST,
    TOY,
    good,
    median,
    mib,
    present,
    ratio,
    request_ms,
    token_us,
    within_rounds,
)
from benchmarks.router.scenarios import IDLE

REQUEST_MOST = 0.75  # of the Rust router's CPU a request
_REQUESTS = ("short", "nonstream", "chat", "prompt32k", "prompt256k")
_STREAMS = ("stream200", "alone200", "step256", "streams1000")
_ARRIVALS = ("burst32", "ttft32", "burst256", "ttft256")
_CROWD = "streams1000"


class Goal(NamedTuple):
    """One line of the table."""

    what: str
    where: str  # the scenario
    found: str
    wanted: str
    reached: bool


def of(runs):
    """Return every goal that the runs can tell about."""
    return [
        *_ratios(runs, _REQUESTS, "CPU a request", (OURS, RUST), request_ms, most=REQUEST_MOST),
        *_ratios(runs, _REQUESTS, "CPU a request", ("plain", RUST), request_ms, most=1.0),
        *_ratios(runs, ("short",), "CPU a request", ("queued", OURS), request_ms, most=1.3),
        *_push(runs),
        *_ratios(runs, _REQUESTS, "CPU a request", (TOY, OURS), request_ms, least=20),
        *_ratios(runs, _STREAMS, "CPU a token", (OURS, RUST), token_us, most=0.9),
        *_arrivals(runs),
        *_crowd(runs),
        *_idle(runs),
        *_measuring(runs),
        *_exact(runs),
    ]


def _ratios(runs, names, what, pair, value, *, most=None, least=None):
    for name in names:
        found = ratio(runs, name, pair, value)
        if found is not None:
            reached = found <= most if most is not None else found >= least
            wanted = f"at most {most}" if most is not None else f"at least {least}"
            yield Goal(f"{what}, {' / '.join(pair)}", f"`{name}`", f"{found:.2f}", wanted, reached)


def _push(runs):
    """Compare the two modes of our own, each a scenario: the runs of one round are beside each
    other.
    """
    pushed, pulled = (median(runs, name, OURS, request_ms) for name in ("push", "short"))
    if pushed is not None and pulled is not None:
        found = pushed / pulled
        yield Goal(
            "CPU a request, push / pull", "`push`", f"{found:.2f}", "at most 1.6", found <= 1.6
        )


def _arrivals(runs):
    for name in _ARRIVALS:
        for share in ("p50", "p99"):
            found = within_rounds(
                runs,
                name,
                (OURS, RUST),
                lambda run, share=share: 1e3 * run["first"][share],
                operator.sub,
            )
            if found is not None:
                what = f"TTFT {share}, {OURS} minus {RUST}"
                yield Goal(what, f"`{name}`", f"{found:+.2f} ms", "at most 0", found <= 0)


def _crowd(runs):
    ours = good(runs, _CROWD, OURS)
    if ours:
        lost = sum(sum(run["faults"].values()) for run in ours)
        done = f"{sum(run['done'] for run in ours):,} streams, {lost:,} faults"
        yield Goal("All complete and exact", f"`{_CROWD}`", done, "no faults", lost == 0)
    found = ratio(runs, _CROWD, (OURS, RUST), mib("rss"))
    if found is not None:
        yield Goal(f"RSS, {OURS} / {RUST}", f"`{_CROWD}`", f"{found:.2f}", "below 1", found < 1)


def _idle(runs):
    goals = (
        (
            "Start-up to the first connection",
            lambda run: run["start"],
            "{:.2f} s",
            1.0,
            "below 1 s",
        ),
        ("CPU", lambda run: run["cores"], "{:.4f} cores", 0.01, "below 0.01 cores"),
        ("RSS", mib("rss"), "{:.0f} MiB", 80, "below 80 MiB"),
    )
    for what, value, form, limit, wanted in goals:
        found = median(runs, IDLE, OURS, value)
        if found is not None:
            yield Goal(what, f"`{IDLE}`", form.format(found), wanted, found < limit)


def _measuring(runs):
    """The load generator must cost little, or it would be what is measured."""
    for name in (*_REQUESTS, "stream200"):
        own = median(runs, name, DIRECT, lambda run: 1e3 * run["cpu"]["load"] / run["requests"])
        routers = [median(runs, name, each, request_ms) for each in present(runs, name)]
        if own is not None and routers:
            found = own / min(routers)
            what = "CPU a request, load generator / cheapest router"
            yield Goal(what, f"`{name}`", f"{found:.2f}", "at most 0.5", found <= 0.5)


def _exact(runs):
    found = [run for name, each in runs.items() if name != IDLE for run in each.get(OURS, ())]
    if found:
        failed = sum("failed" in run for run in found)
        faults = failed + sum(sum(run.get("faults", {}).values()) for run in found)
        done = f"{sum(run.get('requests', 0) for run in found):,} requests, {faults:,} faults"
        yield Goal("Every byte and every leg", "all", done, "no faults", faults == 0)
