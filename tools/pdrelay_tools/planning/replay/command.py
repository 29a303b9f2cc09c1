"""``pdrelay replay``: compares routing policies on a trace, by simulation (docs/replay.md)."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdrelay_proxy.console.flag_values import whole_number
from pdrelay_proxy.features import FEATURES
from pdrelay_tools.planning.columns import in_columns
from pdrelay_tools.planning.engine_model import EngineModel, NoEngineModel, read_engine_model
from pdrelay_tools.planning.replay import chart
from pdrelay_tools.planning.replay.routers import CHOICES
from pdrelay_tools.planning.replay.simulation import Replayed, SimulatedFleet, replay
from pdrelay_tools.planning.replay.summary import Summary, Targets, summarise
from pdrelay_tools.planning.replay.trace_files import Arrivals, read_trace
from pdrelay_tools.planning.replay.traces import Conversations, NoReplay, Phase, Trace, phased_trace

if TYPE_CHECKING:
    from pdrelay_tools.planning.replay.roles import RolesPlan

_MOST_ENGINES: Final = 1000  # of a role
_MOST_TURNS: Final = 1_000_000
_MOST_MEAN: Final = 1_000_000  # tokens
_DEFAULT_POLICIES: Final = ("round_robin", "prefix")
_COUNT: Final = whole_number("a count", 1, _MOST_TURNS)
_ENGINES: Final = whole_number("a number of engines", 1, _MOST_ENGINES)
_HEAD: Final = (
    *("", "TTFT p50", "p95", "p99", "later p50", "ITL p50", "p99"),
    *("hits P", "D", "of best", "computed/new", "good", "uneven P", "D"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    help_text = (
        "Mooncake's JSON lines; prompt_tokens,output_tokens as CSV or JSON lines; or vLLM's "
        "multi-turn conversations"
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help=help_text)
    help_text = (
        f"one of {', '.join(CHOICES)}, or one for each leg as session/prefix; repeat the flag to "
        f"compare "
    )
    help_text += f"(default: {' and '.join(_DEFAULT_POLICIES)})"
    parser.add_argument("--policy", action="append", metavar="POLICY", help=help_text)
    add = partial(parser.add_argument_group("traffic").add_argument, type=_positive)
    add(
        "--sessions",
        type=_COUNT,
        metavar="N",
        help="number of conversations to generate instead of reading a trace",
    )
    add(
        "--turns",
        type=_COUNT,
        default=8,
        metavar="N",
        help="turns of a generated conversation (default: %(default)s)",
    )
    shared = "tokens at the beginning that all generated conversations share (default: %(default)s)"
    add("--system-tokens", type=_COUNT, default=1000, metavar="N", help=shared)
    add(
        "--prompt-tokens",
        default=500,
        metavar="N",
        help="mean prompt tokens that a turn adds (default: %(default)s)",
    )
    add(
        "--output-tokens",
        default=200,
        metavar="N",
        help="mean tokens of an answer (default: %(default)s)",
    )
    help_text = (
        "a phase of traffic: seconds, requests a second, mean tokens of prompts and of answers; "
        "repeat it"
    )
    add("--phase", type=_phase, action="append", metavar="S:R:P:O", help=help_text)
    help_text = (
        "conversations (or requests, of a file of lengths) that begin in a second (default: "
        "%(default)s)"
    )
    add("--rate", default=2.0, metavar="R", help=help_text)
    add(
        "--think",
        default=5.0,
        metavar="S",
        help="mean seconds from an answer to the next turn (default: %(default)s)",
    )
    add(
        "--speed",
        default=1.0,
        metavar="X",
        help="factor by which timestamps pass faster (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of all random choices (default: %(default)s)",
    )
    option = parser.add_argument_group("engines").add_argument
    option(
        "--prefill",
        type=_ENGINES,
        default=4,
        metavar="N",
        help="number of prefill engines (default: %(default)s)",
    )
    option(
        "--decode",
        type=_ENGINES,
        default=4,
        metavar="N",
        help="number of decode engines (default: %(default)s)",
    )
    option(
        "--engine",
        type=Path,
        metavar="FILE",
        help="JSON file with the speed and the cache of an engine (docs/replay.md)",
    )
    option(
        "--decode-engine",
        type=Path,
        metavar="FILE",
        help="the same for decode engines, if they differ",
    )
    option(
        "--odd-engine",
        type=Path,
        metavar="FILE",
        help="the same for the last prefill engine, if it differs",
    )
    help_text = "tokens of a block; Mooncake's traces have their own (default: %(default)s)"
    option("--block-size", type=_COUNT, default=16, metavar="N", help=help_text)
    option(
        "--kv-events",
        action="store_true",
        help="engines tell what they have cached, and prompts are token ids",
    )
    help_text = (
        "auto: engines change their role as with --roles of pdrelay serve, for --ttft and --itl "
        "(default: %(default)s)"
    )
    option("--roles", choices=("off", "auto"), default="off", help=help_text)
    option = parser.add_argument_group("output").add_argument
    help_text = (
        "most seconds to the first token of a request that counts as served well (default: no "
        "limit)"
    )
    option("--ttft", type=_positive, default=inf, metavar="S", help=help_text)
    help_text = "most mean seconds between two tokens of such a request (default: no limit)"
    option("--itl", type=_positive, default=inf, metavar="S", help=help_text)
    option("--json", action="store_true", help="print the results as JSON")
    option("--plot", type=Path, metavar="FILE", help="write a plot as SVG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row for each policy; return the exit code: 0, or 2 if there is nothing to replay."""
    try:
        if args.plot is not None:
            _write(args.plot, "", "a")  # may fail now: a replay may take minutes
        trace = _trace(args)
        decode_model = None if args.decode_engine is None else read_engine_model(args.decode_engine)
        odd_model = None if args.odd_engine is None else read_engine_model(args.odd_engine)
        fleet = SimulatedFleet(
            args.prefill,
            args.decode,
            EngineModel() if args.engine is None else read_engine_model(args.engine),
            decode_model,
            odd_model,
            kv_events=args.kv_events,
            roles=_roles(args),
        )
        policies: Sequence[str] = args.policy or _DEFAULT_POLICIES
        targets = Targets(args.ttft, args.itl)
        replays = [replay(trace, policy, fleet, seed=args.seed) for policy in policies]
        rows = [summarise(replayed, targets) for replayed in replays]
        title = (
            f"{len(trace.turns):,} requests on {args.prefill} prefill and {args.decode} decode "
            f"engines"
        )
        if args.plot is not None:
            _write(args.plot, chart.draw(rows, title))
    except (NoReplay, NoEngineModel) as exc:
        sys.stderr.write(f"pdrelay replay: {exc}\n")
        return 2
    as_json = json.dumps([asdict(row) for row in rows], indent=2) + "\n"
    sys.stdout.write(as_json if args.json else _as_text(rows, title) + _turns_text(replays))
    return 0


def _roles(args: argparse.Namespace) -> "RolesPlan | None":
    if args.roles == "off":
        return None
    if not (isfinite(args.ttft) and isfinite(args.itl)):
        raise NoReplay("--roles auto needs --ttft and --itl: engines turn to keep them")
    if args.kv_events or args.decode_engine or args.odd_engine:
        raise NoReplay("--roles auto needs engines that are alike, without --kv-events")
    if "roles" not in FEATURES:
        raise NoReplay("this router has no feature that changes roles (--roles auto)")
    from pdrelay_tools.planning.replay.roles import plan_for  # noqa: PLC0415 (a feature's)

    return plan_for(args.ttft, args.itl)


def _trace(args: argparse.Namespace) -> Trace:
    if [args.trace, args.sessions, args.phase].count(None) != 2:
        raise NoReplay("give either a trace or --sessions or --phase")
    if args.phase is not None:
        expected = sum(phase.seconds * phase.per_s for phase in args.phase)
        if expected > _MOST_TURNS:
            raise NoReplay(
                f"these phases have about {expected:,.0f} requests, more than {_MOST_TURNS:,}"
            )
        return phased_trace(args.phase, args.block_size, args.seed)
    if args.trace is not None:
        return read_trace(
            args.trace, Arrivals(args.rate, args.think, args.block_size, args.speed, args.seed)
        )
    if args.sessions * args.turns > _MOST_TURNS:
        raise NoReplay(
            f"{args.sessions:,} sessions of {args.turns:,} turns are more than {_MOST_TURNS:,} "
            f"requests"
        )
    lengths = args.system_tokens, args.prompt_tokens, args.output_tokens
    return Conversations(args.sessions, args.turns, args.rate, args.think, *lengths).generate(
        args.block_size, args.seed
    )


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as exc:
        raise NoReplay(f"{path} cannot be written: {exc.strerror}") from exc


def _as_text(rows: Sequence[Summary], title: str) -> str:
    lines = in_columns([_HEAD, *map(_cells, rows)])
    return "\n".join([f"{title}, {rows[0].seconds:,.0f} s", "", *lines, ""])


def _turns_text(replays: Sequence[Replayed]) -> str:
    """Write a line for each role change."""
    lines = [
        f"{replayed.policy}: at {change.began:,.0f} s an engine turns to {change.role}, from "
        f"{change.ended:,.0f} s on "
        f"{change.prefill} prefill and {change.decode} decode engines"
        for replayed in replays
        for change in replayed.turned
    ]
    return "\n".join(["", *lines, ""]) if lines else ""


def _cells(row: Summary) -> tuple[str, ...]:
    return (
        row.policy,
        *map(
            _ms,
            (
                row.ttft_p50,
                row.ttft_p95,
                row.ttft_p99,
                row.later_ttft_p50,
                row.itl_p50,
                row.itl_p99,
            ),
        ),
        *(
            "-" if share is None else f"{share:.0%}"
            for share in (row.prefill_hits, row.decode_hits, row.best_hits)
        ),
        f"{row.computed_per_new:.2f}",
        f"{row.good:.1%}",
        *(
            "-" if more is None else f"{more:.2f}"
            for more in (row.prefill_unevenness, row.decode_unevenness)
        ),
    )


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
    return f"{seconds:.0f} s"


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if isfinite(value) and 0 < value <= 1e9:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _phase(text: str) -> Phase:
    parts = text.split(":")
    if len(parts) != 4:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no phase: write seconds:requests a second:prompt:answer tokens"
        )
    seconds, per_s, prompt, output = map(_positive, parts)
    if max(prompt, output) > _MOST_MEAN:
        raise argparse.ArgumentTypeError(f"{text!r} has a mean of more than {_MOST_MEAN:,} tokens")
    return Phase(seconds, per_s, prompt, output)
