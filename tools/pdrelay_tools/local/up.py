"""`pdrelay up`: starts engines and a router on this machine, and sends a first request."""

import argparse
import errno
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from secrets import token_urlsafe
from types import FrameType

from pdrelay_proxy.console.flag_values import seconds, whole_number
from pdrelay_proxy.console.tables import printable
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_tools.end_signals import on_end_signals
from pdrelay_tools.local import first_request, preflight
from pdrelay_tools.local.errors import ChildFailed, LocalError
from pdrelay_tools.local.first_request import FirstAnswer
from pdrelay_tools.local.model_folder import (
    TINY_NAME,
    check_model,
    named_folder,
    prepare_model,
    prepare_smollm2,
    random_instead,
)
from pdrelay_tools.local.packaged_model import MEGABYTE, SMOLLM2, is_kept
from pdrelay_tools.local.plan import (
    SMOLLM2_FOLDER,
    TINY_FOLDER,
    EngineKind,
    LocalPlan,
    engine_command,
    router_command,
)
from pdrelay_tools.local.processes import (
    DIRECTORY,
    FILE,
    ProcessGroup,
    make_directory,
    open_file,
    open_fleet,
)
from pdrelay_tools.local.recipe import (
    SECRET_VARIABLES,
    Connector,
    has_secret,
    with_plugins,
    with_secret,
)
from pdrelay_tools.local.screen import Screen

READY_TIMEOUT_S = 300.0
MOST_TIMEOUTS = 12  # an engine that writes to its log for so many times that long is given up, too
GRACE_S = 5.0  # an engine that is still starting does not listen to SIGTERM
LOOK_EVERY_S = 0.5
_MOST_ENGINES = 32  # of a role
FAILED = 1
INTERRUPTED = 130
_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
MOVING = {
    EngineMode.PULL: "decode pulls the KV cache (--kv-transfer-mode pull)",
    EngineMode.PUSH: "prefill pushes the KV cache (--kv-transfer-mode push)",
    EngineMode.AUTO: "the router says for each request who moves the KV cache (--kv-transfer-mode auto)",
}
_MOVERS = {  # who counts what moves
    EngineMode.PULL: (Role.DECODE,),
    EngineMode.PUSH: (Role.PREFILL,),
    EngineMode.AUTO: (Role.PREFILL, Role.DECODE),
}
_DEFAULT = LocalPlan()
_WHEEL_MB = round(SMOLLM2.wheel_bytes / MEGABYTE)


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP: stop as if Ctrl-C had been pressed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    for role, count in (("prefill", _DEFAULT.prefill), ("decode", _DEFAULT.decode)):
        add(
            f"--{role}",
            type=whole_number("a number of engines", 1, _MOST_ENGINES),
            default=count,
            metavar="N",
            help=f"number of {role} engines (default: %(default)s)",
        )
    add(
        "--engine",
        choices=list(map(str, EngineKind)),
        default=str(_DEFAULT.kind),
        help="vllm: real engines; sim: simulated ones, without a model and KV (default: %(default)s)",
    )
    add(
        "--connector",
        choices=list(map(str, Connector)),
        default=str(_DEFAULT.connector),
        help=(
            "pdrelay: our KV connector; nixl: vLLM's NixlConnector or NixlPushConnector (default: "
            "%(default)s)"
        ),
    )
    add(
        "--kv-transfer-mode",
        dest="mode",
        choices=list(map(str, EngineMode)),
        help=(
            "pull: decode engines read the KV cache; push: prefill engines write it; auto: the "
            "router chooses (default: auto with our connector and --reuse-kv, else pull)"
        ),
    )
    add(
        "--reuse-kv",
        choices=["true", "false"],
        default="true",
        help=(
            "engines tell what they have cached and return the KV of answers, and the router uses "
            "all of it (default: true)"
        ),
    )
    add(
        "--return-kv",
        action="store_true",
        help="prefill engines read the KV of earlier answers (our connector, pull)",
    )
    for flag, default, owner in (
        ("--port", _DEFAULT.port, "the router"),
        ("--prefill-port", _DEFAULT.prefill_port, "the first prefill engine"),
        ("--decode-port", _DEFAULT.decode_port, "the first decode engine"),
        ("--side-channel-port", _DEFAULT.side_channel_port, "the first engine's side channel"),
    ):
        add(
            flag,
            type=int,
            default=default,
            metavar="PORT",
            help=f"port of {owner} (default: %(default)s)",
        )
    add(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="port of the status page and of the routes for operators (default: that of the router)",
    )
    add(
        "--model",
        metavar="DIR",
        help=(
            f"folder of the model, or {TINY_NAME}: a random one of 5 MB, whose words mean nothing "
            f"(default: {SMOLLM2.name}, which pip fetches once, {_WHEEL_MB} MB)"
        ),
    )
    add(
        "--ready-timeout",
        type=seconds,
        default=READY_TIMEOUT_S,
        metavar="S",
        help="seconds that an engine which starts may write nothing to its log (default: %(default)g)",
    )
    add(
        "--kv-events",
        action="store_true",
        help="engines tell the router what they have cached (docs/kv-events.md)",
    )
    add("--once", action="store_true", help="send one request, show the answer and stop")
    parser.usage = "pdrelay up [OPTION]... [-- OPTION_OF_VLLM...]"
    parser.epilog = "What stands behind -- goes to the engines: pdrelay up -- --max-num-seqs 8"
    parser.set_defaults(run=run, passed_on=())


def run(args: argparse.Namespace) -> int:
    """Start all; return the exit code: 0 if the answer arrived and Ctrl-C or `--once` ended it."""
    plan = LocalPlan(
        prefill=args.prefill,
        decode=args.decode,
        kind=EngineKind(args.engine),
        connector=Connector(args.connector),
        return_kv=args.return_kv,
        reuse_kv=args.reuse_kv == "true",
        port=args.port,
        prefill_port=args.prefill_port,
        decode_port=args.decode_port,
        side_channel_port=args.side_channel_port,
        admin_port=args.admin_port,
        has_own_key=not os.environ.get("ADMIN_API_KEY"),
        engine_args=tuple(args.passed_on),
        kv_events=args.kv_events,
        dtype=preflight.safe_dtype(),
        model=named_folder(args.model or (TINY_NAME if args.engine == EngineKind.SIM else None)),
    )
    plan = replace(
        plan,
        mode=EngineMode(args.mode) if args.mode else plan.usual_mode,
        has_own_secret=plan.has_ours and not has_secret(os.environ),
    )
    screen = Screen()
    try:
        with on_end_signals(_interrupt, signal.SIGTERM, signal.SIGHUP):
            return _up(plan, screen, once=args.once, ready_timeout_s=args.ready_timeout)
    except LocalError as exc:
        _explain(exc, screen)
        return FAILED
    except OSError as exc:
        if exc.errno not in _CANNOT_WRITE:
            raise
        _explain(
            LocalError(f"{exc.filename or plan.home} cannot be written: {exc.strerror}"), screen
        )
        return FAILED
    except KeyboardInterrupt:
        screen.line("Interrupted: no process is left.")
        return INTERRUPTED


def _up(plan: LocalPlan, screen: Screen, *, once: bool, ready_timeout_s: float) -> int:
    engines = f"{plan.prefill} prefill and {plan.decode} decode"
    moving = MOVING[plan.mode]
    if plan.kind is EngineKind.SIM:
        screen.line(
            f"pdrelay: {engines}, simulated engines (no model, no KV cache), as if {moving}"
        )
    else:
        screen.line(
            f"pdrelay: {engines}, vLLM engines with the connector {plan.connector.value}; {moving}"
        )
    check_model(plan.model)
    machine = preflight.inspect_machine(plan)
    if plan.model == SMOLLM2_FOLDER and (reason := preflight.why_too_small(plan, machine)):
        screen.step("model", random_instead(reason))
        plan = replace(plan, model=TINY_FOLDER)
    preflight.check(plan, machine)
    make_home(plan)
    if plan.has_own_key:
        draw_once(plan.key_file)
    if plan.has_own_secret:
        draw_once(plan.secret_file)
    if plan.kind is EngineKind.VLLM:
        plan = replace(plan, model=_prepare_model(plan.model, screen))
        if plan.dtype:
            screen.step(
                "dtype",
                f"{plan.dtype}: with its own choice, bfloat16, vLLM may crash on a CPU with AMX",
            )
    with open_fleet(plan.log_dir, grace_s=GRACE_S) as fleet:
        try:
            _start(plan, fleet, screen, ready_timeout_s)
            movers = [
                f"http://{address}"
                for role in _MOVERS[plan.mode]
                for address in plan.addresses(role)
            ]
            answer = first_request.send_first_request(plan.router_url, movers, plan.served_name)
            _show(answer, plan, screen)
            if not once:
                _stay(plan, fleet, screen, answer)
        finally:
            screen.line("Stopping ...")
    screen.line("Stopped: no process is left.")
    return 0


def _prepare_model(model: Path, screen: Screen) -> Path:
    """Make or fetch the model; return its folder, or the random model's if the fetch failed."""
    if model != SMOLLM2_FOLDER:
        screen.step("model", prepare_model(model))
        return model

    def report(text: str, seconds: float) -> None:
        screen.progress("model", f"{text}, {seconds:.0f} s", seconds)

    def say(text: str) -> None:
        screen.done_waiting()
        screen.step("model", text)

    if not is_kept(model):
        size = f"{_WHEEL_MB} MB ({SMOLLM2.requirement})"
        screen.step("model", f"{SMOLLM2.name} is fetched with pip, once: {size}")
    return prepare_smollm2(say, report)


def make_home(plan: LocalPlan) -> None:
    """Make the folder of logs, caches, sockets and the model, for this user alone."""
    for folder in (plan.home, plan.kv_events_dir) if plan.tells_events else (plan.home,):
        make_directory(folder)
        folder.chmod(DIRECTORY)


def draw_once(path: Path) -> None:
    """Draw a key into a file, unless it has one: another fleet of this folder may still use it."""
    if not (path.is_file() and path.stat().st_size):
        with open_file(path, append=False) as file:
            file.write(f"{token_urlsafe(32)}\n".encode())
    path.chmod(FILE)


def _start(plan: LocalPlan, fleet: ProcessGroup, screen: Screen, ready_timeout_s: float) -> None:
    start = time.monotonic()
    shared = with_plugins(os.environ)
    if plan.has_own_secret:
        shared = with_secret(shared, plan.secret_file)
    commands = [engine_command(plan, spec, shared) for spec in plan.engines()]
    commands.append(router_command(plan, os.environ))
    children = [fleet.start(command) for command in commands]
    for child in children:
        url = child.command.health_url.removesuffix("/health")
        screen.step("start", f"{child.name:<10}  {url}  {child.log}")
    most_s = ready_timeout_s * MOST_TIMEOUTS
    fleet.wait_ready(children, timeout_s=ready_timeout_s, most_s=most_s, report=screen.waiting)
    screen.done_waiting()
    screen.step("ready", f"after {time.monotonic() - start:.1f} s")


def _show(answer: FirstAnswer, plan: LocalPlan, screen: Screen) -> None:
    screen.line()
    screen.step("question", first_request.QUESTION)
    screen.step("answer", printable(answer.text))
    if plan.kind is EngineKind.VLLM and plan.model == TINY_FOLDER:
        screen.step(
            "",
            "(random weights: the words mean nothing, but they depend on every word of the "
            "question)",
        )
    if "mode" in answer.legs:
        screen.step("mode", answer.legs["mode"].engine)
    for name in ("prefill", "decode"):
        leg = answer.legs.get(name)
        time_s = "" if leg is None or leg.ms is None else f" in {leg.ms:.1f} ms"
        screen.step(name, "unknown: the router did not say" if leg is None else leg.engine + time_s)
    screen.step("in all", f"{answer.seconds * 1000:.1f} ms")
    unknown = "unknown: the engines have no metric for it"
    screen.step(
        "KV moved", unknown if answer.bytes_moved is None else f"{answer.bytes_moved:,} bytes"
    )
    screen.line()


def _stay(plan: LocalPlan, fleet: ProcessGroup, screen: Screen, answer: FirstAnswer) -> None:
    body = json.dumps(
        first_request.request_body(plan.served_name, "Why is the sky blue?", max_tokens=48)
    )
    url = f"{plan.router_url}/v1/chat/completions"
    screen.line("Try it from another terminal:")
    screen.line(f"  {_own_command()} chat --url={plan.router_url}")
    screen.line(f"  curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    if answer.request_id is not None:
        screen.line(f"  {_own_command()} why --router={plan.admin_url} {answer.request_id}")
    screen.line()
    screen.step(
        "status", f"{plan.admin_url}/ shows engines and failures in a browser; no key is needed"
    )
    place = (
        f"{plan.key_file}, where pdrelay why, instances and pairs find it"
        if plan.has_own_key
        else "$ADMIN_API_KEY"
    )
    screen.step("admin key", f"in {place}; the routes for operators want it as X-Api-Key")
    if plan.has_own_secret:
        needs = f"{SECRET_VARIABLES[1]}={plan.secret_file} and the mode {plan.mode}"
        screen.step("secret", f"in {plan.secret_file}; an engine that you add needs {needs}")
    screen.line()
    try:
        screen.line("Running. Ctrl-C stops everything.")  # a signal may follow at once
        while True:
            fleet.raise_if_dead()
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        screen.line()


def _own_command() -> str:
    """Return how to call the ``pdrelay`` command from the working directory."""
    command = Path(sys.executable).with_name("pdrelay")
    if not command.is_file():
        return f"{shlex.quote(sys.executable)} -m pdrelay_proxy.cli"
    working_directory = Path.cwd()
    return shlex.quote(
        str(
            command.relative_to(working_directory)
            if command.is_relative_to(working_directory)
            else command
        )
    )


def _explain(error: LocalError, screen: Screen) -> None:
    if isinstance(error, ChildFailed):
        screen.line()
        screen.line(f"The end of {error.log}:")
        for line in error.tail.splitlines():
            screen.line(f"  | {line}")
    screen.line()
    for line in str(error).splitlines():
        sys.stderr.write(f"pdrelay up: {line}\n")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted
