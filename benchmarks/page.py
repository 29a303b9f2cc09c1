"""What the pages of all benchmarks are made with."""

import argparse
import json
import os
import platform
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


def parser_of(doc, quick):
    """Return a parser with the flags that all benchmarks have; ``quick`` is what a quick run is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{quick}: does it work? Writes to .pdrelay/bench")
    parser.add_argument("--out", type=Path, help="the JSON file; the page is written beside it")
    return parser


def out_of(args, name):
    """Return where the raw numbers go."""
    return args.out or ROOT / (".pdrelay/bench" if args.quick else "docs/benchmarks") / f"{name}.json"


def write(seen, out, parts):
    """Write the raw numbers, and beside them the page: its parts, but for those that are empty."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_rounded(seen), indent=1, sort_keys=True) + "\n")
    out.with_suffix(".md").write_text("\n".join(part for part in parts if part))


def machine():
    return {"cores": os.cpu_count(), "processor": platform.machine().replace("_", "-"), "system": platform.system()}


def paragraph(text):
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _rounded(value):
    """Microseconds are enough."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value
