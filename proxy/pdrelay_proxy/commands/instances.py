"""``pdrelay instances``: the engines of a running router, seen and changed from a terminal."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pdrelay_proxy.console.flag_values import seconds_or_none
from pdrelay_proxy.console.router_access import add_access_arguments
from pdrelay_proxy.console.router_client import (
    CommandFailed,
    Json,
    RouterClient,
    run_command,
)
from pdrelay_proxy.console.tables import in_lines, table

_COLUMNS: Final = (
    *("id", "role", "address", "rank", "state", "in_flight", "for", "models", "version", "mode"),
    *("source", "revision", "slice", "why"),
)
_POLL_S: Final = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    add_access_arguments(parser)
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=type(parser))
    verbs.add_parser("list", help="show all engines with their role, state and load").set_defaults(
        verb=_list
    )
    add = verbs.add_parser("add", help="add a running engine")
    add.add_argument("type", choices=["prefill", "decode"], help="role of the engine")
    add.add_argument(
        "address",
        metavar="HOST:PORT",
        help="address of the engine; HOST:PORT#dp=N if it has N data-parallel ranks",
    )
    add.set_defaults(verb=_add)
    changes = {
        "remove": "forget engines at once; to stop an engine, drain it first",
        "drain": "send engines no new requests; they are drained when nothing is left",
        "undrain": "send drained engines requests again",
    }
    for verb, text in changes.items():
        verb_parser = verbs.add_parser(verb, help=text)
        _add_ids(verb_parser)
        verb_parser.set_defaults(verb=_change, name=verb)
        if verb == "drain":
            verb_parser.add_argument(
                "--move",
                action="store_true",
                help="move their streams to other engines (docs/moving-streams.md)",
            )
            _add_wait(verb_parser, "they are drained")
    turn = verbs.add_parser(
        "turn", help="change the role of engines without a restart (they need kv_role kv_both)"
    )
    _add_ids(turn)
    turn.add_argument("to", choices=["prefill", "decode", "both"], help="new role")
    turn.add_argument(
        "--force", action="store_true", help="change it even if no other engine serves the old role"
    )
    _add_wait(turn, "they serve the new role")
    turn.set_defaults(verb=_turn)
    explain = verbs.add_parser(
        "explain", help="show which engines a request would go to, and what each would get"
    )
    explain.add_argument(
        "file", metavar="FILE", help="file with the JSON body of a request; - reads standard input"
    )
    explain.add_argument(
        "--path", default="/v1/completions", help="path of the request (default: %(default)s)"
    )
    explain.add_argument(
        "--session", metavar="ID", help="X-Session-ID of the request (default: none)"
    )
    explain.set_defaults(verb=_explain)
    for verb_parser in verbs.choices.values():
        for flag in add_access_arguments(verb_parser):
            # a flag without a value behind the verb keeps its value before the verb
            flag.default = argparse.SUPPRESS
    parser.set_defaults(run=run)


def _add_ids(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        nargs="+",
        metavar="ID",
        help="id of an engine, such as decode-0 (see list), or its HOST:PORT",
    )


def _add_wait(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--wait",
        type=seconds_or_none,
        default=0.0,
        metavar="S",
        help=f"seconds to wait until {what} (default: 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the verb; return the exit code: 0 done, 1 failed, 2 the request was invalid."""
    verb: Callable[[RouterClient, argparse.Namespace], str] = args.verb
    return run_command("instances", args, lambda router: verb(router, args))


def _list(router: RouterClient, args: argparse.Namespace) -> str:
    return _shown(router.request("/instances"), args)


def _add(router: RouterClient, args: argparse.Namespace) -> str:
    answer = router.request("/instances/add", {"type": args.type, "instance": args.address})
    warning = answer.get("warning")
    return f"{in_lines(answer['message'])}\n" + (
        f"warning: {in_lines(warning)}\n" if warning else ""
    )


def _change(router: RouterClient, args: argparse.Namespace) -> str:
    options = {"move": True} if getattr(args, "move", False) else {}
    return _carried_out(router, args, args.name, options, lambda row: row["state"] == "drained")


def _turn(router: RouterClient, args: argparse.Namespace) -> str:
    options = {"to": args.to, "force": args.force}
    return _carried_out(
        router,
        args,
        "turn",
        options,
        lambda row: row["role"] == args.to and row["turns_to"] is None,
    )


def _carried_out(
    router: RouterClient,
    args: argparse.Namespace,
    verb: str,
    options: Mapping[str, object],
    is_done: Callable[[Json], bool],
) -> str:
    """Change the named engines, wait until that is done, if that is asked for, and show them."""
    answers = [
        router.request(f"/instances/{verb}", {**_named(router, name), **options})
        for name in args.id
    ]
    rows = [row for answer in answers for row in answer["instances"]]
    if getattr(args, "wait", 0):
        rows = _wait(router, args.id, args.wait, is_done)
    return _shown({"instances": rows}, args)


def _named(router: RouterClient, name: str) -> Mapping[str, object]:
    """Return the fields that name an engine; an address comes with its role, which is the same at
    every router of a service.
    """
    if ":" not in name:
        return {"id": name}
    roles = {
        row["declared"]
        for row in router.request("/instances")["instances"]
        if row["address"] == name
    }
    if not roles:
        raise CommandFailed(f"there is no instance at {name}")
    if len(roles) > 1:
        raise CommandFailed(
            f"{name} was added as a prefill and as a decode instance: name it by its id, see list"
        )
    return {"type": roles.pop(), "instance": name}


def _wait(
    router: RouterClient, names: Sequence[str], seconds: float, is_done: Callable[[Json], bool]
) -> list[Json]:
    """Wait until all of them are done; an engine that is removed meanwhile counts as done."""
    deadline = time.monotonic() + seconds
    while True:
        rows = [
            row
            for row in router.request("/instances")["instances"]
            if row["id"] in names or row["address"] in names
        ]
        left = [row for row in rows if not is_done(row)]
        if not left:
            return rows
        if time.monotonic() >= deadline:
            text = ", ".join(
                f"{row['id']} is {row['state']} with {row['in_flight']} in flight" for row in left
            )
            raise CommandFailed(f"after {seconds:g} s {text}")
        time.sleep(_POLL_S)


def _explain(router: RouterClient, args: argparse.Namespace) -> str:
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        body = json.loads(text)
    except OSError as exc:
        raise CommandFailed(f"{args.file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise CommandFailed(f"{args.file} is not JSON: {exc}") from exc
    headers = {} if args.session is None else {"x-session-id": args.session}
    answer = router.request(
        "/instances/explain", {"path": args.path, "body": body, "headers": headers}
    )
    if args.json:
        return json.dumps(answer) + "\n"
    return _explained(answer)


def _explained(answer: Json) -> str:
    """Write an explanation for people."""
    bodies = [(leg, answer.pop(f"{leg}_body", None)) for leg in ("prefill", "decode")]
    answer = in_lines(answer)
    lines = [
        f"rule:     {answer['rule']}",
        f"prefill:  {answer['prefill'] or '-'}",
        f"decode:   {answer['decode']}",
    ]
    if answer.get("prefill_slice") or answer.get("decode_slice"):
        crossing = f" ({answer['slice_crossing']})" if answer.get("slice_crossing") else ""
        lines.append(
            f"slices:   {answer['prefill_slice'] or '-'} and "
            f"{answer['decode_slice'] or '-'}{crossing}"
        )
    lines += [
        f"resting:  {pair['prefill']} with {pair['decode']}: {pair['reason']}"
        for pair in answer.get("resting_pairs", ())
    ]
    lines.append(
        f"prompt:   {answer['prompt_bytes']} B; alone if D lacks less than "
        f"{answer['min_split_new_bytes']} B"
    )
    lines += [
        f"alone:    {name} computes {size} B now"
        for name, size in answer.get("lone_prompt_bytes", {}).items()
    ]
    if bound := answer.get("lone_prompt_bound"):
        lines.append(
            f"bound:    {bound}: streams of the decode engine that has most of it would wait for "
            f"too long"
        )
    by = answer.get("cached_known_by", {})
    lines += [
        f"cached:   {size} B at {name}{f', known by {by[name]}' if name in by else ''}"
        for name, size in answer["cached_bytes"].items()
    ]
    lines += [
        f"cached:   {count} token{'' if count == 1 else 's'} at {name}"
        for name, count in answer.get("cached_tokens", {}).items()
    ]
    if expected := answer.get("expected_ms"):
        lines.append(
            "expected: " + ", ".join(f"{name} {value:g} ms" for name, value in expected.items())
        )
    lines += [
        f"{leg} body:\n{json.dumps(body, indent=2, ensure_ascii=False)}"
        for leg, body in bodies
        if body
    ]
    return "\n".join(lines) + "\n"


def _shown(answer: Json, args: argparse.Namespace) -> str:
    if args.json:
        return json.dumps(answer) + "\n"
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for row in in_lines(answer["instances"]):
        role = f"{row['role']}, to {row['turns_to']}" if row.get("turns_to") else row["role"]
        values = {
            **row,
            "role": role,
            "for": _duration(row["since_s"]),
            "models": ",".join(row["models"] or ()),
        }
        rows.append(
            tuple(
                str(values[name]) if values.get(name) not in (None, "") else "-"
                for name in _COLUMNS
            )
        )
    warnings = dict.fromkeys(row["warning"] for row in answer["instances"] if row.get("warning"))
    return table(rows) + "".join(f"warning: {warning}\n" for warning in warnings)


def _duration(seconds: float) -> str:
    """Format a duration for people, cut to its two largest parts."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
