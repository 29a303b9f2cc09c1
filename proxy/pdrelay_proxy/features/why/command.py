"""``pdrelay why NAME``: where the time of a request went, in the router and both engines.

docs/why.md explains the rows.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from pdrelay_proxy.console.router_access import add_access_arguments
from pdrelay_proxy.console.router_client import (
    Json,
    RouterClient,
    run_command,
)
from pdrelay_proxy.console.tables import in_lines, widths_of

_BAR: Final = 30  # characters that stand for the whole time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "name",
        metavar="NAME",
        help="X-Request-Id of the response, the client's own id, or the beginning of one",
    )
    add_access_arguments(parser)
    parser.add_argument(
        "--router-only", action="store_true", help="do not ask the engines (one may hang)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the timeline; return the exit code: 0 done, 1 failed, 2 wrong flags."""
    return run_command("why", args, lambda router: _answer(router, args))


def _answer(router: RouterClient, args: argparse.Namespace) -> str:
    query = "?engines=false" if args.router_only else ""
    answer = router.request(f"/requests/{quote(args.name, safe='')}{query}")
    return json.dumps(answer) + "\n" if args.json else text(answer)


def text(answer: Json) -> str:
    """Write the requests for people."""
    answer = in_lines(answer)
    shown = "\n".join(_request(request) for request in answer["requests"])
    return shown + (f"\n{answer['omitted']} more have this name.\n" if answer["omitted"] else "")


def _request(request: Json) -> str:
    began = datetime.fromtimestamp(request["began_at"], UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    client = f" (client: {request['client_id']})" if request["client_id"] else ""
    status = (
        f"{request['status']} {request['outcome']}"
        if request["status"]
        else f"under way: {request['state']}"
    )
    reason = f", {request['single_reason']}" if request["single_reason"] else ""
    lines = [
        f"{request['request_id']}{client}",
        f"{request['path']}  {status}  {request['mode']}{reason}  {began}Z  "
        f"{request['duration_ms']:.1f} ms",
    ]
    lines += [f"error: {request['error']}"] if request["error"] else []
    lines += [f"retried: {retry}" for retry in request["retries"]]
    lines += [f"cut: {move}" for move in request.get("moves", ())]
    rows: Sequence[Json] = request["rows"]
    inner = [row for row in rows if row["leg"]]
    table = [("start", "ms", "", "", "")]
    for row in rows:
        if row["leg"]:
            continue
        table.append(_cells(row, request["duration_ms"], row["what"]))
        # an engine's rows belong to its leg; they may end after it
        if row["what"].endswith(" leg"):
            parts = [part for part in inner if part["leg"] == row["where"]]
            inner = [part for part in inner if part["leg"] != row["where"]]
            table += [_cells(part, request["duration_ms"], f"  {part['what']}") for part in parts]
    widths = widths_of(table)
    lines += [
        f"{start:>{widths[0]}}  {ms:>{widths[1]}}  {what:<{widths[2]}}  {bar:<{widths[3]}}  {note}".rstrip()
        for start, ms, what, bar, note in table
    ]
    lines += [f"note: {note}" for note in request["notes"]]
    return "\n".join(lines) + "\n"


def _cells(row: Json, total_ms: float, what: str) -> tuple[str, str, str, str, str]:
    begin = max(0.0, row["begin_ms"])
    duration = row["duration_ms"]
    share = _BAR / total_ms if total_ms else 0.0
    before = min(_BAR, round(begin * share))
    length = min(_BAR - before, max(round((begin + duration) * share) - before, 0))
    bar = " " * before + ("#" * length or "|")
    where = "" if row["leg"] or row["where"] == "router" else f" {row['where']}"
    return f"{row['begin_ms']:.1f}", f"{duration:.1f}", what + where, bar, row["note"]
