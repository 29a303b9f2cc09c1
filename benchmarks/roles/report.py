"""A part of docs/benchmarks/fleet.md, from the raw numbers."""

import json

from benchmarks import page
from benchmarks.page import paragraph, table
from benchmarks.roles.trace import HALVES

GOAL = 1.3  # times the goodput of the best split that never changes
ALONE = ("1 + 2", "2 + 1")
ABOUT = {
    "auto": "`--roles auto`, 1 + 2 at first",
    "wrong": "`auto`, 2 + 1 at first",
    "killed": "`auto`, the router that decides is killed between the halves",
    "doubled": "`auto` in two routers, clients use both",
}


def earlier(out, settings):
    """Return what is in a file that was written with the same settings."""
    found = json.loads(out.read_text())
    if found["settings"] != json.loads(json.dumps(settings)):
        raise SystemExit(
            f"{out} was measured with other settings: measure all rows again, without --more"
        )
    return found


def parts(seen):
    """Return the parts of the page."""
    return [_head(seen), _goodput(seen), _times(seen), _turns(seen)]


def _head(seen):
    settings = seen["settings"]
    step, token, stream = (value * 1e3 for value in settings["pace"])
    about = paragraph("""
`make bench-roles` measures everything and writes this page; with `QUICK=1` halves of 20 seconds, to see whether all of
it works, and it writes to `.pdrelay/bench`. The numbers are in `roles.json`.""")
    setting = paragraph(f"""
{settings["engines"]} CPU engines of vLLM with the tiny model and our connector (`kv_both`, pull) for each row, all
settings of roles at their defaults.
The same requests come to each row at the same times (Poisson), as greedy streams:
{settings["seconds"]:.0f} s of {_half(HALVES[0])}, then as long {_half(HALVES[1])}. **Served well**: the text is
a single engine's, the first token came within {settings["ttft_s"]:g} s, and the mean time between two
tokens was at most {settings["itl_s"] * 1e3:g} ms.""")
    bounded = paragraph(f"""
**What is bounded.** Engines of one machine share its cores: one that turns would bring nothing, because what it
computes the others cannot. So each step of an engine lasts at least {step:g} ms, {token:g} ms for each prompt token
in it and {stream:g} ms for each stream in it, and the engine sleeps until then (`tests/support/pacing.py`): it has the
time of an accelerator of its own, and the cores are not full. A step has at most {settings["chunk"]} tokens, an engine
at most {settings["slots"]} requests. A prompt of 1,500 tokens then takes 0.87 s, and an engine makes 125 tokens a
second at the target. The scheduler, the KV cache, the transfers, the router, its metrics and every token are real.""")
    measured = page.setting(seen["about"])
    return f"# Roles that follow the traffic\n\n{about}\n{measured}\n{setting}\n{bounded}"


def _half(half):
    prompt, answer = (" to ".join(f"{n:,}" for n in each) for each in (half.prompt, half.answer))
    return f"{half.per_s:g} requests a second with {prompt} tokens of prompt and {answer} of answer"


def _goodput(seen):
    rows = seen["rows"]
    names = [half.name for half in HALVES]
    best = max((rows[name]["good"] for name in ALONE if name in rows), default=0)
    cells = [
        [
            ABOUT.get(name, f"{name}, never changes"), f"{row['good'] / row['requests']:.0%}",
            *[f"{row['halves'][half]['good'] / row['halves'][half]['requests']:.0%}" for half in names],
            f"{row['good_per_s']:.2f}", f"{row['good'] / best:.2f}" if best else "-", _turned(row),
            row["requests"] - row["right"] - row["errors"] - row["wrong"], row["errors"], row["wrong"],
        ]
        for name, row in _ordered(rows)
    ]  # fmt: skip
    heads = [
        "prefill + decode", "served well", *names, "such requests/s", "to the best split", "turns",
            "lost",
        "errors", "wrong texts",
    ]  # fmt: skip
    return f"## Goodput\n\n{table(heads, cells)}\n{_verdict(rows, best)}"


def _verdict(rows, best):
    ways = [name for name in ABOUT if name in rows]
    if not best or not ways:
        return ""
    worst = min(rows[name]["good"] for name in ALONE if name in rows)
    least = min(rows[name]["good"] for name in ways)
    goal = (
        "met"
        if rows["auto"]["good"] >= GOAL * best
        else "missed"
        if "auto" in rows
        else "not measured"
    )
    below = "never below the worst split" if least >= worst else "BELOW the worst split"
    return paragraph(
        f"The goal, at least {GOAL} times the best split with one router: {goal}; {below}."
    )


def _times(seen):
    columns = [
        (half.name, f"{what}_{which}_s", form, scale)
        for what, form, scale in (("ttft", "{:.2f}", 1), ("itl", "{:.0f}", 1e3))
        for half in HALVES
        for which in ("p50", "p95")
    ]
    cells = [
        [
            name,
            *(_time(row["halves"][half][key], form, scale) for half, key, form, scale in columns),
        ]
        for name, row in _ordered(seen["rows"])
    ]
    heads = [""] + [f"{what}, {half.name}, {which}" for what in ("TTFT s", "ITL ms") for half in HALVES
                    for which in ("p50", "p95")]  # fmt: skip
    return f"## Times\n\n{table(heads, cells)}"


def _time(seconds, form, scale):
    return "-" if seconds is None else form.format(seconds * scale)


def _turns(seen):
    lines = []
    for name, row in _ordered(seen["rows"]):
        if name in ABOUT:
            moved = {
                key.split('"')[1]: int(value)
                for key, value in row["counted"].items()
                if "streams_moved" in key
            }
            steps = ", ".join(
                f"{split[0]} + {split[1]} at {at:.0f} s" for at, split in row["roles"]
            )
            lines.append(
                f"- {name}: {steps}. Streams that were to move: {moved or 'none'}; at the end "
                f"{row['held']} engines "
                "held a lease."
            )
    return (
        "## Turns\n\nAn engine that turns serves neither role meanwhile.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _turned(row):
    """Return how many engines have turned."""
    found = [
        value
        for name, value in row["counted"].items()
        if name.startswith("pdrelay_turns_total") and '"turned"' in name
    ]
    return round(sum(found))


def _ordered(rows):
    return [(name, rows[name]) for name in (*ALONE, *ABOUT) if name in rows]
