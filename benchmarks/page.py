"""What the pages of all benchmarks are made with."""

import argparse
import json
import os
import platform
import re
import shlex
import signal
import sys
import textwrap
import time
from importlib.metadata import version
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


def end_as_by_ctrl_c():
    """Have SIGTERM end what was started first, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))


def about(*packages):
    """Return when something is measured, by which command, and with what."""
    program = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": shlex.join(["python", "-m", ".".join(program), *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pdrelay", *packages)},
        },
    }


def setting(abouts):
    """Say what was measured when, and with what; ``abouts``: by the names of parts of a page."""
    parts = {}
    for name, each in abouts.items():
        parts.setdefault(json.dumps(each), []).append(f"`{name}`")
    texts = []
    for each, names in parts.items():
        fields = json.loads(each)
        versions = ", ".join(f"{name} {number}" for name, number in fields["versions"].items())
        what = f"{', '.join(names)}: " if len(parts) > 1 else ""
        texts.append(
            f"{what}{fields['date']}, `{fields['command']}`; {fields['machine']}; {versions}."
        )
    return "\n".join(map(paragraph, texts))


def write(seen, out, parts_of, picture_of=None):
    """Write the raw numbers, and then the page: its parts, but for those that are empty."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_rounded(seen), indent=1) + "\n")
    write_page(out, "\n".join(part for part in parts_of(seen) if part))
    if picture_of is not None and (svg := picture_of(seen)):
        out.with_suffix(".svg").write_text(svg)


def show(out):
    """Print the page."""
    print(f"{page_of(out).read_text()}\nwritten to {out.with_suffix('.*')}")


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
    """Write the text of these raw numbers: a page, or in the documentation what stands between its
    marks.
    """
    page = page_of(out)
    if out.parent == PAGES:
        begin = f"<!-- begin: {out.stem} -->\n"
        end = f"<!-- end: {out.stem} -->\n"
        before, rest = page.read_text().split(begin)
        _, after = rest.split(end)
        part = text if page.stem == out.stem else re.sub(r"(?m)^#", "##", text)
        text = f"{before}{begin}{part.rstrip()}\n\n{end}{after}"
    page.write_text(text)


def paragraph(text):
    return (
        textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)
        + "\n"
    )


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def quantile(values, share):
    """Return the value that such a share of all values does not exceed."""
    return sorted(values)[round(share * (len(values) - 1))]


def _rounded(value):
    """Microseconds are enough."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value
