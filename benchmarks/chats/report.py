"""The page of the chats: what the numbers are, and how they stand beside the goals."""

import statistics

from benchmarks import page
from benchmarks.chats.fleet import ROUND_ROBIN
from benchmarks.page import paragraph, table

SIDES = {
    ROUND_ROBIN: "the defaults",
    "prefix": "`prefix` on both legs, `--kv-events auto`, `--min-split-new-bytes 800`",
    "prefix, ids": "the same, and clients send prompts as token ids, so that the router can look them up",
    "prefix, split": "`prefix` on both legs, `--kv-events auto`: every turn is split",
    "expected_ttft": (
        "`expected_ttft` on both legs, `--kv-events auto`, `--min-split-new-bytes 800`"
    ),
}
WORST = 5  # turns that missed most, for the raw numbers
HIT_GOAL = 0.95
TTFT_GOAL = 0.6
ITL_GOAL = 1.1
ABOUT = {
    "normal": "All conversations fit into the cache of every engine.",
    "restart": (
        "A decode engine is stopped in the middle, while no request is under way, and started "
        "again while the chats go "
        "on. The hit rate is that of the turns behind that; the other columns are those of the "
        "whole phase."
    ),
    "evictions": "Each engine has a cache of a tenth of all conversations (or three conversations, if that is more), "
    "and four times as many chats go on at a time as fit into one engine's cache.",
}


def summary(turns, side):
    """Return the numbers of one configuration; hits and first tokens are those of the second turn
    and later ones.

    ``computed``: prompt tokens by role, as answers tell of them; a decode engine also computes the
    last token of each prompt that it loads, and what it loads less than a block of.
    """
    own = [turn for turn in turns if turn.side == side]
    later = [turn for turn in own if turn.turn and turn.is_right]
    firsts = [turn.first for turn in later]
    gaps = [gap for turn in own for gap in turn.gaps]
    return {
        "turns": len(own),
        "right": sum(turn.is_right for turn in own),
        "later": len(later),
        "alone": sum(turn.is_alone for turn in later),
        "computed": {
            "p": sum(turn.tokens - turn.cached for turn in own if not turn.is_alone),
            "d": sum(turn.tokens - turn.cached for turn in own if turn.is_alone),
        },
        "tokens": sum(turn.tokens for turn in later),
        "cached": sum(turn.cached for turn in later),
        "hit": sum(min(turn.cached, turn.most) for turn in later),  # of what the oracle knew
        "most": sum(turn.most for turn in later),
        "first_p50": _quantile(firsts, 0.5),
        "first_p95": _quantile(firsts, 0.95),
        "gap_p50": _quantile(gaps, 0.5),
        "gap_p99": _quantile(gaps, 0.99),
        "worst": [
            str(turn) for turn in sorted(later, key=lambda turn: turn.cached - turn.most)[:WORST]
        ],
    }


def hit_rate(found):
    """Return the share of what the oracle would have hit; None: there was nothing to hit."""
    return found["hit"] / found["most"] if found["most"] else None


def parts(seen):
    """Return the parts of the page."""
    phases = seen["phases"]
    return [_head(seen), *(_phase(name, found) for name, found in phases.items()), _goals(phases)]


def _head(seen):
    settings = seen["settings"]
    about = paragraph("""
`make bench-chats` measures everything and writes this page; with `QUICK=1` a few chats, to see whether all of it works,
and it writes to `.pdrelay/bench`. The numbers are in `chats.json`.""")
    setting = paragraph(f"""
{settings["prefill"]} prefill and {settings["decode"]} decode CPU engines with the tiny model, blocks of 32 tokens. A
first question has 260
tokens, later ones 60, an answer 24; {settings["turns"]} turns, streamed; between turns clients wait, exponentially
distributed around a second. One router for each configuration stands in front of the same engines; the same
chats are held through all of them in one batch, with salts that keep their caches apart, at most
{settings["at_once"]} requests at once. Every text is compared with a single engine's.""")
    oracle = paragraph("""
**The oracle** follows the KV events of all engines, and notes when a request is sent how many tokens of its prompt the
best of them has: any engine counts, a decode engine too, for it can serve alone. What the request hit is what its
answer says (`cached_tokens`: of the prefill engine, or of a decode engine that served alone). The hit rate is the sum
of the second over the sum of the first, and no request counts for more than the oracle knew.""")
    used = {side for found in seen["phases"].values() for side in found["sides"]}
    configurations = "".join(
        f"- `{name}`: {text}\n" for name, text in SIDES.items() if name in used
    )
    measured = page.setting({"": seen["about"]})
    return f"# Chats of several turns\n\n{about}\n{measured}\n{setting}\n{configurations}\n{oracle}"


def _phase(name, found):
    base = found["sides"].get(ROUND_ROBIN)
    rows = []
    for side, each in found["sides"].items():
        rate = hit_rate(found["after"].get(side) or each)
        missing = each["tokens"] - each["most"]
        rows.append([
            f"`{side}`", f"{each['right']} of {each['turns']}", "-" if rate is None else f"{rate:.3f}",
            f"{(each['tokens'] - each['cached']) / missing:.2f}" if missing else "-",
            f"{each['alone'] / each['later']:.0%}" if each["later"] else "-",
            _ms(each["first_p50"]), _ms(each["first_p95"]), _ratio(each, base, "first_p50"),
            _ms(each["gap_p50"]), _ms(each["gap_p99"]), _ratio(each, base, "gap_p99"),
        ])  # fmt: skip
    heads = [
        "configuration", "texts equal", "hit rate / oracle's", "computed / cached nowhere", "D alone",
            "TTFT p50, ms",
        "p95", "p50 / round robin", "ITL p50, ms", "p99", "p99 / round robin",
    ]  # fmt: skip
    about = (
        f"{ABOUT[name]} {found['chats']} chats for each configuration, {found['seconds']:.0f} s."
    )
    if name == "evictions":
        about += (
            f" An engine has {found['blocks']} blocks, all conversations {found['working_set']}."
        )
    return f"## {name.capitalize()}\n\n{paragraph(about)}\n{table(heads, rows)}\n{_counted(found)}"


def _counted(found):
    """What the engines' own counters say of all configurations together."""
    if not found["counted"]:
        return ""
    p, d = found["counted"]["p"], found["counted"]["d"]
    told = sum(each["computed"]["p"] for each in found["sides"].values())
    return paragraph(f"""
By the engines' counters (`vllm:prompt_tokens_by_source_total`), all configurations and turns together: prefill
engines computed {p["computed"]:,.0f} tokens (by the answers {told:,}) and had {p["hit"]:,.0f} in their own caches,
decode engines computed {d["computed"]:,.0f} and had {d["hit"]:,.0f}.""")


def _goals(phases):
    rows = []
    for name, found in phases.items():
        base = found["sides"].get(ROUND_ROBIN)
        for side, each in found["sides"].items():
            if side == ROUND_ROBIN:
                continue
            rate = hit_rate(found["after"].get(side) or each)
            rows.append([name, f"`{side}`", _judged(rate, HIT_GOAL, most=False)])
            rows[-1] += [_judged(_over(each, base, key), goal) for key, goal in GOALS]
    heads = ["phase", "configuration", f"hit rate at least {HIT_GOAL}"]
    heads += [f"TTFT p50 at most {TTFT_GOAL}", f"ITL p99 at most {ITL_GOAL}"]
    return f"## Goals\n\n{table(heads, rows)}"


GOALS = (("first_p50", TTFT_GOAL), ("gap_p99", ITL_GOAL))


def _judged(value, goal, *, most=True):
    if value is None:
        return "-"
    return f"{value:.2f}, {'met' if (value <= goal) == most or value == goal else 'missed'}"


def _over(each, base, key):
    return each[key] / base[key] if base and base[key] and each[key] else None


def _ratio(each, base, key):
    value = _over(each, base, key)
    return "-" if value is None else f"{value:.2f}"


def _quantile(values, share):
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def _ms(seconds):
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
