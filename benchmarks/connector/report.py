"""docs/benchmarks/connector.md from the raw numbers.

A section that was never measured is left out.
"""

import statistics

from benchmarks import page
from benchmarks.chart import draw, linear
from benchmarks.connector.models import KV_BYTES
from benchmarks.connector.pairs import CHUNK, LEG_LENGTHS, LENGTHS, LINKED, NIXL_PULL, PULL, PUSH
from benchmarks.page import paragraph, quantile, table

SLOW = 100  # Mbit/s: the link at which streaming must pay
CHUNK_MIB = CHUNK * KV_BYTES / 2**20


def write(seen, out):
    """Write the raw numbers, the page and its picture."""
    page.write(seen, out, parts, picture)


def parts(seen):
    """Return the parts of the page."""
    return [_head(seen), *(part(seen) for key, part in PARTS.items() if seen.get(key))]


def picture(seen):
    """Return the picture of the page, if there is anything to draw."""
    slow = seen.get("link", {}).get(str(SLOW), {})
    bars = {name: [_median(slow[name], length, "exposed") for length in LENGTHS] for name in slow}
    title = f"Exposed transfer time at {SLOW} Mbit/s"
    return bars and draw(bars, _heads(), title, linear, "{:.2f}")


def _head(seen):
    about = paragraph("""
`make bench-connector` measures everything and writes this page; with `ONLY=C` it measures one section and leaves
the others as they are; with `QUICK=1` it sends few requests, to see whether all of it works, and writes to
`.pdrelay/bench`. The raw numbers are in `connector.json`.""")
    setting = paragraph(f"""
CPU engines in float32 that compute with one thread each and `--max-num-batched-tokens {CHUNK}`. The pairs of engines
run one at a time, in {seen["counts"]["rounds"]} rounds of turns. Requests are sent one after the other, over one
HTTP client
that keeps its connections; no two prompts begin alike. Every connector runs in a wrapper that notes two times a
request (`benchmarks/connector/stamped.py`).""")
    measured = page.setting(seen["about"])
    return f"# The connector beside vLLM's own\n\n{about}\n{measured}\n{setting}"


def _decode_leg(seen):
    found = seen["decode_leg"]
    ours = PULL.name
    theirs = NIXL_PULL.name
    if not {ours, theirs} <= found.keys():
        return ""
    rows = []
    for length in LEG_LENGTHS:
        times = [found[name][str(length)] for name in (ours, theirs)]
        cells = [
            cell
            for each in times
            for cell in (_ms(statistics.median(each)), _ms(quantile(each, 0.95)))
        ]
        ratio = statistics.median(times[0]) / statistics.median(times[1])
        rows.append([length, *cells, f"{ratio:.2f}"])
    heads = [
        "prompt, tokens",
        f"{ours} median",
        "p95",
        f"{theirs} median",
        "p95",
        "ratio of medians",
    ]
    idle, holding = (
        [f"{statistics.mean(found[n][key]):.3f}" for n in (ours, theirs)]
        for key in ("idle", "holding")
    )
    costs = [
        ["idle pair (everything in both engines' processes, after their traffic)", *idle],
        ["P while one finished request is held", *holding],
    ]
    about = paragraph(f"""
Requests per row and connector: {seen["counts"]["decode_leg"]}; tiny model, loopback. Milliseconds from sending the
decode leg, when P has answered, to its first token.""")
    tables = f"{table(heads, rows)}\n{table(['cores', ours, theirs], costs)}"
    return f"## A. Decode leg, pull\n\n{about}\n{tables}"


def _whole(seen):
    about = paragraph(f"""
Requests per cell: {seen["counts"]["whole"]}; tiny model, loopback. Milliseconds from sending the first leg to D's
first token: median (p95). In pull D's leg is sent when P has answered, in push both at once.""")
    return f"""## B. Whole requests, one host

{about}
{table(["connector", *_heads()], _rows(seen["whole"], "first_token"))}
Of that, the exposed time (see C):

{table(["connector", *_heads()], _rows(seen["whole"], "exposed"))}"""


def _link(seen):
    setting = paragraph(f"""
Requests per cell: {seen["counts"]["link"]}; each engine in a network namespace of its own, joined by a veth pair that
`tc` limits, NIXL over TCP (`UCX_TLS=tcp`). The model has random weights and {KV_BYTES // 1024} KiB of KV per token:
a chunk of {CHUNK} tokens is {CHUNK_MIB:g} MiB, which take {CHUNK * KV_BYTES * 8 / SLOW / 1e6:.2f} s at {SLOW} Mbit/s.
{_compute(seen)} Streaming can only hide transfer behind computing: where a chunk takes longer to send than to
compute, chunks queue up, and the last one is not the only one that is exposed.""")
    exposed = paragraph("""
**Exposed** is the time from P having computed the last token of the prompt to the request being runnable on D, as
the schedulers of the engines see it: what the transfer adds to a request. Milliseconds, median (p95).""")
    picture = "![Exposed time by prompt length and connector](connector.svg)"
    text = f"## C. Whole requests, a slow link\n\n{setting}\n{exposed}\n{picture}\n"
    for mbit, found in sorted(seen["link"].items(), key=lambda item: int(item[0])):
        text += f"\n{int(mbit):,} Mbit/s, exposed:\n\n{table(['connector', *_heads()], _rows(found, 'exposed'))}"
        text += _times_shorter(found)
        text += f"\n{int(mbit):,} Mbit/s, first leg to first token:\n\n"
        text += table(["connector", *_heads()], _rows(found, "first_token"))
    return text


def _times_shorter(found):
    """How many times shorter the exposed time of streaming is than each other's."""
    if PUSH.name not in found:
        return ""
    rows = []
    for name in found:
        if name != PUSH.name:
            ratios = [
                _median(found[name], length, "exposed")
                / _median(found[PUSH.name], length, "exposed")
                for length in LENGTHS
            ]
            rows.append([name, *(f"{ratio:.1f}" for ratio in ratios)])
    return f"\nThe same, as a multiple of {PUSH.name}:\n\n{table(['connector', *_heads()], rows)}"


def _compute(seen):
    """How long a chunk takes to compute, as the replies of P show."""
    chunks = LENGTHS[-1] / CHUNK
    times = {
        name: _median(each, LENGTHS[-1], "prefill") / chunks
        for name, each in seen["link"][str(SLOW)].items()
    }
    said = ", ".join(f"{seconds:.2f} s ({name})" for name, seconds in times.items())
    return f"Computing one took, on the mean of a prompt of {LENGTHS[-1]:,} tokens: {said}."


def _waiting(seen):
    rows = [
        [name, f"{statistics.mean(each['cores']):.3f}", f"{max(each['cores']):.3f}"]
        for name, each in seen["waiting"].items()
    ]
    about = (
        "Cores that all of D's processes use in the 5 s after D's leg was sent, while P's leg is "
        "held back."
    )
    return f"""## D. A decode engine that waits for a push

{about}

{table(["connector", "mean", "most"], rows)}"""


PARTS = {"decode_leg": _decode_leg, "whole": _whole, "link": _link, "waiting": _waiting}


def _heads():
    return [f"{length:,} tokens" for length in LENGTHS]


def _rows(found, key):
    order = [kind.name for kind in LINKED if kind.name in found]
    return [
        [
            name,
            *(
                f"{_ms(_median(found[name], n, key))} ({_ms(quantile(found[name][str(n)][key], 0.95))})"
                for n in LENGTHS
            ),
        ]
        for name in order
    ]


def _median(found, length, key):
    return statistics.median(found[str(length)][key])


def _ms(seconds):
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"
