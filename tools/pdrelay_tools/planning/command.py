"""``pdrelay plan``: how many engines of each role a traffic needs (docs/scaling.md)."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from math import gcd, isfinite
from pathlib import Path
from typing import Final

from pdrelay_proxy.settings import PolicyName
from pdrelay_tools.planning import sizing
from pdrelay_tools.planning.columns import in_columns
from pdrelay_tools.planning.engine_model import NoEngineModel, read_engine_model
from pdrelay_tools.planning.queueing import Spread
from pdrelay_tools.planning.sizing import NoPlan

_BYTES_PER_GBIT: Final = 1e9 / 8
_MOST_BYTES: Final = 64 * 1024 * 1024  # of a file of lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    traffic = parser.add_argument_group("what clients ask for")
    arrivals = traffic.add_mutually_exclusive_group(required=True)
    arrivals.add_argument(
        "--requests-per-second", type=float, metavar="R", help="requests a second of all clients"
    )
    arrivals.add_argument(
        "--prompt-tokens-per-second",
        type=float,
        metavar="N",
        help="instead: prompt tokens a second of all clients",
    )
    traffic.add_argument(
        "--prompt-lengths",
        metavar="FILE",
        help="text file with prompt lengths in tokens, instead of --prompt-tokens",
    )
    add = partial(traffic.add_argument, type=float)
    spread = "their 95th percentile (default: 3 times the mean, an exponential distribution)"
    add("--prompt-tokens", metavar="N", help="mean tokens of a prompt")
    add("--prompt-tokens-p95", metavar="N", help=spread)
    add("--output-tokens", metavar="N", required=True, help="mean tokens of an answer")
    add("--output-tokens-p95", metavar="N", help=spread)
    help_text = (
        "share of the prompt tokens that hit the prefill engines' prefix caches, 0 to 1 (default: "
        "%(default)s)"
    )
    add("--cached", metavar="SHARE", default=0.0, help=help_text)
    _add_engines(parser)
    add = partial(parser.add_argument_group("what is wanted").add_argument, type=float)
    add(
        "--itl",
        metavar="S",
        required=True,
        help="target: most seconds between two tokens of an answer",
    )
    help_text = "target: most seconds to the first token, 95th percentile (default: none)"
    add("--ttft", metavar="S", help=help_text)
    help_text = "mean share of a resource that may be busy, 0 to 1 (default: %(default)s)"
    add("--utilisation", metavar="SHARE", default=0.7, help=help_text)
    help_text = (
        "the router's prefill policy (default: %(default)s); with session and prefix requests wait "
        "longer"
    )
    parser.add_argument(
        "--prefill-policy",
        choices=list(map(str, sizing.WAITS)),
        default="round_robin",
        help=help_text,
    )
    help_text = "routers in front of the same engines (default: %(default)s)"
    parser.add_argument("--routers", type=int, metavar="N", default=1, help=help_text)
    help_text = (
        "whether the routers share the load of engines, as with --peers of pdrelay serve (default: "
        "%(default)s)"
    )
    parser.add_argument("--peers", choices=["true", "false"], default="true", help=help_text)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def _add_engines(parser: argparse.ArgumentParser) -> None:
    add = partial(
        parser.add_argument_group("what one engine does, measured").add_argument, type=float
    )
    help_text = "prompt tokens a second that one busy prefill engine computes"
    add("--prefill-rate", metavar="TOKENS/S", help=help_text)
    help_text = "tokens a second that one decode engine makes at the ITL target"
    add("--decode-rate", metavar="TOKENS/S", help=help_text)
    help_text = "tokens that fit into the KV cache of one decode engine"
    add("--kv-capacity", metavar="TOKENS", help=help_text)
    add(
        "--kv-bytes-per-token",
        metavar="BYTES",
        help="bytes of KV of one token, all layers and ranks together",
    )
    help_text = "Gbit/s of one engine's link for KV transfers (default: links are no limit)"
    add("--link-gbit", metavar="GBIT/S", help=help_text)
    add = partial(
        parser.add_argument_group("or what pdrelay replay simulates").add_argument, type=Path
    )
    add(
        "--engine",
        metavar="FILE",
        help="JSON file with the speed and the cache of an engine (docs/replay.md)",
    )
    add("--decode-engine", metavar="FILE", help="the same for decode engines, if they differ")


def run(args: argparse.Namespace) -> int:
    """Print the plan; return the exit code: 0, or 2 if no plan follows from the numbers."""
    try:
        dispatch = PolicyName(args.prefill_policy)
        peers = args.peers == "true"
        aims = sizing.Aims(args.itl, args.ttft, args.utilisation, dispatch, args.routers, peers)
        prompt = _prompt(args)
        rate = args.requests_per_second
        if rate is None:
            rate = args.prompt_tokens_per_second / prompt.mean
        output = sizing.lengths("output", args.output_tokens, args.output_tokens_p95)
        traffic = sizing.Traffic(rate, prompt, output, args.cached)
        plan = sizing.plan(traffic, _rates(args, traffic, aims), aims)
    except (NoPlan, NoEngineModel) as exc:
        sys.stderr.write(f"pdrelay plan: {exc}\n")
        return 2
    sys.stdout.write(
        json.dumps(_as_json(plan), indent=2) + "\n" if args.json else _as_text(plan, aims)
    )
    return 0


def _rates(args: argparse.Namespace, traffic: sizing.Traffic, aims: sizing.Aims) -> sizing.Rates:
    needed = (args.prefill_rate, args.decode_rate, args.kv_capacity)
    if args.engine is None:
        if None in needed or args.decode_engine is not None:
            raise NoPlan("give --prefill-rate, --decode-rate and --kv-capacity, or --engine")
        link = None if args.link_gbit is None else args.link_gbit * _BYTES_PER_GBIT
        return sizing.Rates(*needed, args.kv_bytes_per_token, link)
    if any(value is not None for value in (*needed, args.kv_bytes_per_token, args.link_gbit)):
        raise NoPlan(
            "--engine has rates, KV and link of its own: leave out those that were measured"
        )
    prefill = read_engine_model(args.engine)
    decode = prefill if args.decode_engine is None else read_engine_model(args.decode_engine)
    return sizing.rates_of(prefill, decode, traffic, aims)


def _prompt(args: argparse.Namespace) -> Spread:
    if (args.prompt_lengths is None) == (args.prompt_tokens is None):
        raise NoPlan("give either --prompt-tokens or --prompt-lengths")
    if args.prompt_lengths is None:
        return sizing.lengths("prompt", args.prompt_tokens, args.prompt_tokens_p95)
    if args.prompt_tokens_p95 is not None:
        raise NoPlan(
            "--prompt-tokens-p95 belongs to --prompt-tokens: lengths have a p95 of their own"
        )
    return sizing.observed("prompt", _numbers(args.prompt_lengths))


def _numbers(name: str) -> list[float]:
    try:
        with Path(name).open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as exc:
        raise NoPlan(
            f"{name} cannot be read: {getattr(exc, 'strerror', None) or 'it is not text'}"
        ) from exc
    if len(text) > _MOST_BYTES:
        raise NoPlan(
            f"{name} is larger than {_MOST_BYTES:,} bytes: a sample of 10,000 lengths is enough"
        )
    words = text.replace(",", " ").split()
    try:
        return [float(word) for word in words]
    except ValueError as exc:
        raise NoPlan(f"{name} must hold numbers and nothing else: {exc}") from exc


def _as_json(plan: sizing.CapacityPlan) -> dict[str, object]:
    return {
        "prefill": plan.need.prefill,
        "decode": plan.need.decode,
        "ratio": _ratio(plan.need),
        "prefill_decided_by": plan.need.prefill_by,
        "decode_decided_by": plan.need.decode_by,
        "engines_busy": {str(name): work for name, work in plan.work.items()},
        **_outlook_json(plan.outlook),
        "traffic": [
            {
                "factor": swing.factor,
                "needs": None
                if swing.need is None
                else {"prefill": swing.need.prefill, "decode": swing.need.decode},
                **_outlook_json(swing.outlook),
            }
            for swing in plan.swings
        ],
    }


def _outlook_json(outlook: sizing.Outlook) -> dict[str, object]:
    seconds = outlook.ttft
    parts = ("queue", "prefill", "transfer", "first_step", "mean", "p95")
    ttft = None if seconds is None else {name: getattr(seconds, name) for name in parts}
    utilisation = {str(name): share for name, share in outlook.utilisation.items()}
    return {"utilisation": utilisation, "ttft_s": ttft, "decode_batch": outlook.decode_batch}


def _as_text(plan: sizing.CapacityPlan, aims: sizing.Aims) -> str:
    need = plan.need
    shares = plan.outlook.utilisation
    use = [(str(name), f"{work:.2f}", f"{shares[name]:.0%}") for name, work in plan.work.items()]
    batch = ("requests on a decode engine", f"{plan.outlook.decode_batch:.1f}", "")
    lines = [
        f"{need.prefill} prefill and {need.decode} decode engines, {_ratio(need)}",
        f"prefill is decided by: {need.prefill_by}",
        f"decode is decided by:  {need.decode_by}",
        "",
        *in_columns([("resource", "engines busy", "utilisation"), *use, batch]),
        "",
        *in_columns([("time to first token", "mean", "p95"), *_times(plan.outlook.ttft, aims)]),
        "",
        *in_columns(
            [("traffic", "needs", "with these: busiest", "TTFT p95"), *map(_swung, plan.swings)]
        ),
    ]
    return "".join(line.rstrip() + "\n" for line in lines)


def _ratio(need: sizing.Need) -> str:
    common = gcd(need.prefill, need.decode)
    return f"{need.prefill // common}:{need.decode // common}"


def _times(ttft: sizing.Ttft | None, aims: sizing.Aims) -> list[Sequence[str]]:
    if ttft is None:  # cannot be: a plan keeps every utilisation below 1
        return [("endless", "", "")]
    parts: list[tuple[str, float]] = [
        ("queue", ttft.queue),
        ("prefill", ttft.prefill),
        ("transfer", ttft.transfer),
    ]
    rows: list[Sequence[str]] = [(name, _seconds(value), "") for name, value in parts if value]
    target = "" if aims.ttft_s is None else f" of {_seconds(aims.ttft_s)}"
    last = ("sum", _seconds(ttft.mean), _seconds(ttft.p95) + target)
    return [*rows, ("first decode step", _seconds(ttft.first_step), ""), last]


def _swung(swing: sizing.Swing) -> Sequence[str]:
    name, share = max(swing.outlook.utilisation.items(), key=lambda item: item[1])
    needs = (
        "no number will do" if swing.need is None else f"{swing.need.prefill} + {swing.need.decode}"
    )
    ttft = "grows without end" if swing.outlook.ttft is None else _seconds(swing.outlook.ttft.p95)
    factor = "as planned" if swing.factor == 1 else f"{swing.factor - 1:+.0%}"
    return factor, needs, f"{name} {share:.0%}", ttft


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if isfinite(value) and value < 1 else f"{value:.2f} s"
