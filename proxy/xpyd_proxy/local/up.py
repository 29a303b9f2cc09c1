"""`xpyd up`: prefill engines, decode engines and the router on this machine, and a first request through them."""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from xpyd_proxy.core.model import Role
from xpyd_proxy.core.protocol.push import EngineMode
from xpyd_proxy.local import first_request, preflight
from xpyd_proxy.local.errors import ChildFailed, LocalError
from xpyd_proxy.local.first_request import FirstAnswer
from xpyd_proxy.local.plan import MODEL_NAME, EngineKind, LocalPlan, engine_command, router_command
from xpyd_proxy.local.processes import DIRECTORY, ProcessGroup, make_directory, open_fleet
from xpyd_proxy.local.recipe import Connector, with_secret
from xpyd_proxy.local.screen import Screen

READY_TIMEOUT_S = 300.0
GRACE_S = 5.0  # an engine that is still starting does not listen to SIGTERM
LOOK_EVERY_S = 0.5
FAILED, INTERRUPTED = 1, 130
MOVING = {
    EngineMode.PULL: "decode pulls the KV cache (--kv-transfer-mode pull)",
    EngineMode.PUSH: "prefill pushes the KV cache (--kv-transfer-mode push)",
    EngineMode.AUTO: "the router says for each request who moves the KV cache (--kv-transfer-mode auto)",
}
_DEFAULT = LocalPlan()


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP: stop as if Ctrl-C had been pressed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "--prefill",
        type=_count,
        default=_DEFAULT.prefill,
        metavar="N",
        help="number of prefill engines (default: %(default)s)",
    )
    add(
        "--decode",
        type=_count,
        default=_DEFAULT.decode,
        metavar="N",
        help="number of decode engines (default: %(default)s)",
    )
    kind = "vllm: real engines; sim: simulated ones, without a model and KV (default: %(default)s)"
    engines, connectors, modes = (list(map(str, kinds)) for kinds in (EngineKind, Connector, EngineMode))
    ours = "xpyd: our KV connector; nixl: vLLM's NixlConnector or NixlPushConnector (default: %(default)s)"
    add("--engine", choices=engines, default=str(_DEFAULT.kind), help=kind)
    add("--connector", choices=connectors, default=str(_DEFAULT.connector), help=ours)
    said = "pull: decode engines read the KV cache; push: prefill engines write it; auto: the router chooses "
    said += "(default: %(default)s)"
    add("--kv-transfer-mode", dest="mode", choices=modes, default=str(_DEFAULT.mode), help=said)
    add("--return-kv", action="store_true", help="prefill engines read the KV of earlier answers (our connector, pull)")
    for flag, default, owner in (
        ("--port", _DEFAULT.port, "the router"),
        ("--prefill-port", _DEFAULT.prefill_port, "the first prefill engine"),
        ("--decode-port", _DEFAULT.decode_port, "the first decode engine"),
        ("--side-channel-port", _DEFAULT.side_channel_port, "the first engine's side channel"),
    ):
        add(flag, type=int, default=default, metavar="PORT", help=f"port of {owner} (default: %(default)s)")
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help=f"folder of the model; without one there, a tiny one is made (default: {_DEFAULT.model})",
    )
    said = "engines tell the router what they have cached (docs/kv-events-router.md)"
    add("--kv-events", action="store_true", help=said)
    add("--once", action="store_true", help="send one request, show the answer and stop")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit code: 0 when the answer arrived and Ctrl-C or `--once` ended it."""
    as_given = ("prefill", "decode", "port", "prefill_port", "decode_port", "side_channel_port", "kv_events")
    plan = LocalPlan(
        kind=EngineKind(args.engine),
        connector=Connector(args.connector),
        mode=EngineMode(args.mode),
        return_kv=args.return_kv,
        model=args.model or _DEFAULT.model,
        dtype=preflight.safe_dtype(),
        **{name: getattr(args, name) for name in as_given},
    )
    screen = Screen()
    try:
        with _terminate_like_ctrl_c():
            return _up(plan, screen, once=args.once)
    except LocalError as exc:
        _explain(exc, screen)
        return FAILED
    except KeyboardInterrupt:
        screen.line("Interrupted: no process is left.")
        return INTERRUPTED


def _up(plan: LocalPlan, screen: Screen, *, once: bool) -> int:
    engines, moving = f"{plan.prefill} prefill and {plan.decode} decode", MOVING[plan.mode]
    if plan.kind is EngineKind.SIM:
        screen.line(f"xpyd: {engines}, simulated engines (no model, no KV cache), as if {moving}")
    else:
        screen.line(f"xpyd: {engines}, vLLM engines with the connector {plan.connector.value}; {moving}")
    preflight.check(plan, preflight.look(plan))
    make_home(plan)
    if plan.kind is EngineKind.VLLM:
        _make_model(plan, screen)
        if plan.dtype:
            screen.step("dtype", f"{plan.dtype}: with its own choice, bfloat16, vLLM may crash on a CPU with AMX")
    with open_fleet(plan.log_dir, grace_s=GRACE_S) as fleet:
        try:
            _start(plan, fleet, screen)
            mover = Role.PREFILL if plan.mode == EngineMode.PUSH else Role.DECODE  # it knows how much it moves
            movers = [f"http://{address}" for address in plan.addresses(mover)]
            _show(first_request.ask(plan.router_url, movers, MODEL_NAME), plan, screen)
            if not once:
                _stay(plan, fleet, screen)
        finally:
            screen.line("Stopping ...")
    screen.line("Stopped: no process is left.")
    return 0


def make_home(plan: LocalPlan) -> None:
    """Make the folder of logs, caches, sockets and the model, for this user alone."""
    for folder in (plan.home, plan.kv_events_dir) if plan.kv_events else (plan.home,):
        make_directory(folder)
        folder.chmod(DIRECTORY)


def _make_model(plan: LocalPlan, screen: Screen) -> None:
    if (plan.model / "config.json").exists() and plan.model != _DEFAULT.model:
        screen.step("model", f"{plan.model}, as it is")
        return
    from xpyd_proxy.local.model import ensure_model  # noqa: PLC0415 (simulated engines do without its libraries)

    made = ensure_model(plan.model)
    screen.step("model", f"{plan.model}, {'made' if made else 'made earlier'}: random weights, 5 MB")


def _start(plan: LocalPlan, fleet: ProcessGroup, screen: Screen) -> None:
    start = time.monotonic()
    shared = with_secret(os.environ)
    commands = [engine_command(plan, spec, shared) for spec in plan.engines()]
    commands.append(router_command(plan, os.environ))
    children = [fleet.start(command) for command in commands]
    for child in children:
        url = child.command.health_url.removesuffix("/health")
        screen.step("start", f"{child.name:<10}  {url}  {child.log}")
    fleet.wait_ready(children, timeout_s=READY_TIMEOUT_S, report=screen.waiting)
    screen.done_waiting()
    screen.step("ready", f"after {time.monotonic() - start:.1f} s")


def _show(answer: FirstAnswer, plan: LocalPlan, screen: Screen) -> None:
    screen.line()
    screen.step("question", first_request.QUESTION)
    screen.step("answer", answer.text)
    if plan.kind is EngineKind.VLLM:
        screen.step("", "(random weights: the words mean nothing, but they depend on every word of the question)")
    if "mode" in answer.legs:
        screen.step("mode", answer.legs["mode"].engine)
    for name in ("prefill", "decode"):
        leg = answer.legs.get(name)
        time_s = "" if leg is None or leg.ms is None else f" in {leg.ms:.1f} ms"
        screen.step(name, "unknown: the router did not say" if leg is None else leg.engine + time_s)
    screen.step("in all", f"{answer.seconds * 1000:.1f} ms")
    unknown = "unknown: the engines have no metric for it"
    screen.step("KV moved", unknown if answer.bytes_moved is None else f"{answer.bytes_moved:,} bytes")
    screen.line()


def _stay(plan: LocalPlan, fleet: ProcessGroup, screen: Screen) -> None:
    body = json.dumps(first_request.request_body(MODEL_NAME, "Where does the river end?"))
    url = f"{plan.router_url}/v1/chat/completions"
    screen.line("Try it from another terminal:")
    screen.line(f"  curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    screen.line()
    try:
        screen.line("Running. Ctrl-C stops everything.")  # a signal may follow at once
        while True:
            fleet.raise_if_dead()
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        screen.line()


def _explain(error: LocalError, screen: Screen) -> None:
    if isinstance(error, ChildFailed):
        screen.line()
        screen.line(f"The end of {error.log}:")
        for line in error.tail.splitlines():
            screen.line(f"  | {line}")
    screen.line()
    for line in str(error).splitlines():
        sys.stderr.write(f"xpyd up: {line}\n")


@contextmanager
def _terminate_like_ctrl_c() -> Generator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 32:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of engines: write one from 1 to 32")
