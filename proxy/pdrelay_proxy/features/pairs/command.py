"""``pdrelay pairs``: which prefill and decode engines have met, and which cannot
(docs/faults.md).
"""

import argparse
import json
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.console.router_client import (
    Json,
    RouterClient,
    add_access_arguments,
    run_command,
)
from pdrelay_proxy.console.tables import in_lines, table

_COLUMNS: Final = (
    "prefill",
    "decode",
    "state",
    "reason",
    "mode",
    "handovers",
    "failed",
    "ttft",
    "kv rate",
    "last",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.allow_abbrev = True  # scripts may say --fail
    add_access_arguments(parser)
    parser.add_argument(
        "--failing", action="store_true", help="show only pairs that fail, or have failed"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print them; return the exit code: 0 done, 1 not done, 2 it could not be asked for like
    this.
    """
    return run_command("pairs", args, lambda router: _answer(router, args))


def _answer(router: RouterClient, args: argparse.Namespace) -> str:
    found = router.ask("/pairs")
    if args.failing:
        found["pairs"] = [row for row in found["pairs"] if row["state"] != "well" or row["failed"]]
    return json.dumps(found) + "\n" if args.json else text(found)


def text(found: Json) -> str:
    """Write the pairs for people."""
    found = in_lines(found)
    notes: Sequence[str] = [
        *[
            f"{row['decode']} loads no KV of {row['prefill']}: {row['why']}"
            for row in found["pairs"]
            if row.get("why")
        ],
        *([f"{found['dropped']} pairs were forgotten to make room"] if found["dropped"] else []),
    ]
    return table([_COLUMNS, *map(_cells, found["pairs"])]) + "".join(f"{note}\n" for note in notes)


def _rate(bytes_per_s: float | None) -> str:
    """Write how fast KV moved, with three digits."""
    if bytes_per_s is None:
        return "-"
    return (
        f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    )


def _mode(row: Json) -> str:
    """Write the way that KV goes; while both are tried, and behind it, what was measured of
    either.
    """
    times = [row["pull_s"], row["push_s"]]
    if row["mode"] is None or None in times:
        return row["mode"] or "-"
    return f"{row['mode']} ({times[0] * 1e3:.0f} and {times[1] * 1e3:.0f} ms)"


def _cells(row: Json) -> tuple[str, ...]:
    rest = "" if row["rest_s"] is None else f" {row['rest_s']:.0f} s"
    failures = ", ".join(f"{count} {how}" for how, count in row["failures"].items())
    return (
        row["prefill"],
        row["decode"],
        f"{row['state']}{rest}",
        row["reason"] or "-",
        _mode(row),
        str(row["handovers"]),
        failures or "-",
        "-" if row["ttft_s"] is None else f"{row['ttft_s'] * 1e3:.1f} ms",
        _rate(row["bytes_per_s"]),
        "-" if row["last_s"] is None else f"{row['last_s']:.0f} s ago",
    )
