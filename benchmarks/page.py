"""What the pages of all benchmarks are made with."""

import argparse
import json
import os
import platform
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/benchmarks"
PART_OF = {
    "workers": "router",
    "soak": "router",
    "first-token": "router",
    "shapes": "connector",
    "limits": "connector",
    "roles": "fleet",
}


def parser_of(doc, quick):
    """Return a parser with the flags that all benchmarks have; ``quick`` is what a quick run is."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick}: does it work? Writes to .pdrelay/bench"
    )
    parser.add_argument("--out", type=Path, help="the JSON file; a page is written beside it")
    return parser


def out_of(args, name):
    """Return where the raw numbers go."""
    return args.out or (ROOT / ".pdrelay/bench" if args.quick else PAGES) / f"{name}.json"


def write(seen, out, parts):
    """Write the raw numbers and the page: its parts, but for those that are empty."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_rounded(seen), indent=1, sort_keys=True) + "\n")
    write_page(out, "\n".join(part for part in parts if part))


def page_of(out):
    """Return the page of these raw numbers: beside them, and in the documentation one page has
    several results.
    """
    return (
        out.with_name(f"{PART_OF.get(out.stem, out.stem)}.md")
        if out.parent == PAGES
        else out.with_suffix(".md")
    )


def write_page(out, text):
    """Write the text of these raw numbers: a whole page, or what stands between its marks in a
    page.
    """
    page = page_of(out)
    begin = f"<!-- begin: {out.stem} -->\n"
    end = f"<!-- end: {out.stem} -->\n"
    before, marked, rest = page.read_text().partition(begin) if page.exists() else ("", "", "")
    if marked:
        part = text if page.stem == out.stem else re.sub(r"(?m)^#", "##", text)
        text = f"{before}{begin}{part.rstrip()}\n\n{end}{rest.partition(end)[2]}"
    page.write_text(text)


def machine():
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine().replace("_", "-"),
        "system": platform.system(),
    }


def paragraph(text):
    return (
        textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)
        + "\n"
    )


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
