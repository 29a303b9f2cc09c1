"""Our connector beside vLLM's own: what a request waits for, and what waiting costs.

``make bench-connector`` runs everything and writes docs/benchmarks/connector.md, .json and .svg.
The sections:

A: the decode leg alone, pull; and what idle engines cost.
B: whole requests, pull and push, engines on one host.
C: whole requests, engines on two hosts with a slow link between them (network namespaces: needs
root).
D: what a decode engine costs while it waits for a push.

The pairs take turns and one runs at a time: vLLM's connector burns a core per engine even when
idle.
"""

import argparse
import json
import sys

from benchmarks import page
from benchmarks.connector import measure, report
from benchmarks.connector.client import Client, prompts
from benchmarks.connector.models import PACKAGES, tiny_model, wide_model
from benchmarks.connector.pairs import KINDS, LINKED, NIXL_PULL, PULL, PUSH, running
from support.netns import lab_available, open_lab

LIMITS = (100, 1000)  # Mbit/s
DECODE_LEG = "decode_leg"
WHOLE = "whole"
LINK = "link"
WAITING = "waiting"
SECTIONS = {"A": DECODE_LEG, "B": WHOLE, "C": LINK, "D": WAITING}
# requests per length and connector, all rounds together
FULL = {"rounds": 2, DECODE_LEG: 50, WHOLE: 10, LINK: 4}
QUICK = {"rounds": 1, DECODE_LEG: 4, WHOLE: 2, LINK: 1}


def main():
    args = arguments()
    page.end_as_by_ctrl_c()
    counts = QUICK if args.quick else FULL
    chosen = {SECTIONS[letter] for letter in args.only}
    if LINK in chosen and (why := lab_available()):
        print(f"Without section C: {why}.", file=sys.stderr)
        chosen.remove(LINK)
    seen = {section: {} for section in SECTIONS.values() if section in chosen}
    abouts = dict.fromkeys(seen, page.about(*PACKAGES))
    with Client() as client:
        prompt = prompts()
        for round_ in range(counts["rounds"]):
            share = {name: -(-count // counts["rounds"]) for name, count in counts.items()}
            on_one_host(round_, share, seen, client, prompt)
            on_two_hosts(
                round_, share, seen, client, prompt, LINKED if not args.quick else (PULL, PUSH)
            )
    done = {name: count for name, count in counts.items() if name in chosen or name == "rounds"}
    report.write(with_earlier(args.out, {"about": abouts, "counts": done, **seen}), args.out)
    page.show(args.out)


def arguments():
    parser = page.parser_of(__doc__, "few requests, and two connectors only in C")
    parser.add_argument(
        "--only",
        default="ABCD",
        type=sections,
        help="sections to measure; the others stay as they are",
    )
    args = parser.parse_args()
    args.out = page.out_of(args, "connector")
    return args


def sections(letters):
    if not letters or set(letters) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{letters!r} is not some of {''.join(SECTIONS)}")
    return letters


def on_one_host(round_, share, seen, client, prompt):
    """Sections A, B and D: every pair serves all that it takes part in."""
    for kind in KINDS:
        takes_part = {
            WHOLE: kind in LINKED,
            WAITING: kind.is_push,
            DECODE_LEG: kind in (PULL, NIXL_PULL),
        }
        if not (parts := [part for part in takes_part if takes_part[part] and part in seen]):
            continue
        say(round_, kind, parts)
        with running(kind, tiny_model(), client, prompt) as pair:
            found = {part: seen[part].setdefault(kind.name, {}) for part in parts}
            if WHOLE in parts:
                measure.whole(pair, prompt, share[WHOLE], found[WHOLE])
            if WAITING in parts:
                measure.waiting(pair, client, prompt, found[WAITING])
            if DECODE_LEG in parts:
                measure.decode_leg(pair, prompt, share[DECODE_LEG], found[DECODE_LEG])
                measure.resting(pair, client, prompt, found[DECODE_LEG])


def on_two_hosts(round_, share, seen, client, prompt, kinds):
    """Section C. The same pair sees every limit."""
    if LINK not in seen:
        return
    for kind in kinds:
        say(round_, kind, [LINK])
        with open_lab() as lab:
            hosts, args = (lab.p, lab.d), ("--load-format", "dummy")
            with running(kind, wide_model(), client, prompt, hosts=hosts, args=args) as pair:
                for mbit in LIMITS:
                    lab.limit(mbit)
                    found = seen[LINK].setdefault(str(mbit), {}).setdefault(kind.name, {})
                    measure.whole(pair, prompt, share[LINK], found)


def with_earlier(out, seen):
    """Add what was measured before, of the sections that were not measured now."""
    earlier = json.loads(out.read_text()) if out.exists() else {}
    return (
        earlier | seen | {name: earlier.get(name, {}) | seen[name] for name in ("about", "counts")}
    )


def say(round_, kind, parts):
    print(f"round {round_ + 1}: {kind.name}: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
