"""``pdrelay pairs``: the pairs of engines that have transferred KV, and those that cannot
(docs/faults.md).
"""

import argparse
import json
from collections.abc import Sequence
from typing import Final

from pdrelay_proxy.console.router_access import add_access_arguments
from pdrelay_proxy.console.router_client import (
    Json,
    RouterClient,
    run_command,
)
from pdrelay_proxy.console.tables import in_lines, table
from pdrelay_proxy.features.pairs.texts import duration, rate

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
    """Print them; return the exit code: 0 done, 1 failed, 2 the request was invalid."""
    return run_command("pairs", args, lambda router: _answer(router, args))


def _answer(router: RouterClient, args: argparse.Namespace) -> str:
    answer = router.request("/pairs")
    if args.failing:
        answer["pairs"] = [
            row for row in answer["pairs"] if row["state"] != "well" or row["failed"]
        ]
    return json.dumps(answer) + "\n" if args.json else text(answer)


def text(answer: Json) -> str:
    """Format the pairs for people."""
    answer = in_lines(answer)
    notes: Sequence[str] = [
        *[
            f"{row['decode']} loads no KV of {row['prefill']}: {row['why']}"
            for row in answer["pairs"]
            if row.get("why")
        ],
        *([f"{answer['dropped']} pairs were forgotten to make room"] if answer["dropped"] else []),
    ]
    return table([_COLUMNS, *map(_cells, answer["pairs"])]) + "".join(f"{note}\n" for note in notes)


def _mode(row: Json) -> str:
    """Format the transfer mode; while both are tried, with the measured times of both."""
    times = [row["pull_s"], row["push_s"]]
    if row["mode"] is None or None in times:
        return row["mode"] or "-"
    return f"{row['mode']} ({times[0] * 1e3:.0f} and {times[1] * 1e3:.0f} ms)"


def _cells(row: Json) -> tuple[str, ...]:
    rest = "" if row["rest_s"] is None else f" {row['rest_s']:.0f} s"
    failures = ", ".join(f"{count} {reason}" for reason, count in row["failures"].items())
    return (
        row["prefill"],
        row["decode"],
        f"{row['state']}{rest}",
        row["reason"] or "-",
        _mode(row),
        str(row["handovers"]),
        failures or "-",
        duration(row["ttft_s"]),
        rate(row["bytes_per_s"]),
        "-" if row["last_s"] is None else f"{row['last_s']:.0f} s ago",
    )
