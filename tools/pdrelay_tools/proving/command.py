"""``pdrelay prove``: its flags, its progress, its reports and its exit code (docs/prove.md)."""

import argparse
import asyncio
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import SystemRandom
from types import FrameType
from typing import Final

from pdrelay_proxy.console.flag_values import seconds, server_url, whole_number
from pdrelay_proxy.console.tables import printable
from pdrelay_proxy.core.address import dns_name
from pdrelay_proxy.core.admission.keys import outbound_key
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.one_line import shortened
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.files import read_text
from pdrelay_tools.end_signals import on_end_signals
from pdrelay_tools.http_server import HttpServer, Transport, open_transport
from pdrelay_tools.local.errors import ChildFailed
from pdrelay_tools.local.processes import Child, Command, open_fleet
from pdrelay_tools.proving.bench import Bench, CheckAborted, Limits, new_prompts, now
from pdrelay_tools.proving.check import Check
from pdrelay_tools.proving.core.answer import Malformed
from pdrelay_tools.proving.core.cards import ModelFacts, read_models
from pdrelay_tools.proving.core.finding import CheckReport
from pdrelay_tools.proving.core.run_report import COULD_NOT_RUN, RunReport, line
from pdrelay_tools.proving.idleness import wait_rest
from pdrelay_tools.proving.peers import Deed, Peers
from pdrelay_tools.proving.report.html_page import write_html
from pdrelay_tools.proving.report.json_page import write_json
from pdrelay_tools.proving.report.markdown import write_markdown
from pdrelay_tools.proving.services import EnginePairs, Service, SingleServer
from pdrelay_tools.proving.suite import ALL_CHECKS, UsageSamples, chosen, run_checks

_WRITERS: Final = {".html": write_html, ".md": write_markdown, ".json": write_json}
_ROLES: Final = (Role.PREFILL.value, Role.DECODE.value)
_KEYS: Final = {  # variables, as the router has them
    "router": "PDRELAY_ROUTER_API_KEY",
    "prefill": "PDRELAY_PREFILL_API_KEY",
    "decode": "PDRELAY_DECODE_API_KEY",
    "reference": "PDRELAY_REFERENCE_API_KEY",
}
_POLL_S: Final = 0.5
_QUICK_S: Final = 10.0  # for health checks and lists of models
_DEFAULT_BLOCK: Final = 16  # tokens; vLLM's own default, where engines do not say
_GRACE_S: Final = 30.0
_MOST_BLOCK: Final = 1_000_000  # tokens
_MOST_PID: Final = 2**22  # of Linux


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of a run."""

    router: HttpServer | None
    prefill: Sequence[HttpServer]
    decode: Sequence[HttpServer]
    reference: HttpServer | None

    @property
    def all(self) -> list[HttpServer]:
        """All servers."""
        return [
            *self.prefill,
            *self.decode,
            *(server for server in (self.router, self.reference) if server is not None),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    limits = Limits()
    add = parser.add_argument
    add_list = partial(add, action="append", default=[])
    add_time = partial(add, type=seconds, metavar="S")
    # signals to 0, -1 and -N go to many processes (kill(2)), and 1 is init
    pid = whole_number("the number of an engine's process", 2, _MOST_PID)
    add_list("--prefill", metavar="URL", help="URL of a prefill engine; repeat it for each")
    add_list("--decode", metavar="URL", help="URL of a decode engine; repeat it for each")
    text = "router to send requests to (default: none; the suite routes itself)"
    add("--router", metavar="URL", help=text)
    text = "single engine with the same model, whose answers are taken as right"
    add("--reference", metavar="URL", help=text)
    add("--model", metavar="NAME", help="model to ask (default: the first that is listed)")
    text = "command to start first and to stop at the end"
    add_list("--start", metavar="COMMAND", help=text)
    text = "seconds until all must answer (default: %(default)g)"
    add_time("--start-seconds", default=600.0, help=text)
    for role in _ROLES:
        for deed in Deed:
            text = f"command to {deed} the first {role} engine"
            add(f"--{deed}-{role}", metavar="COMMAND", help=text)
        text = f"process id of the first {role} engine on this machine, for signals"
        add(f"--{role}-pid", type=pid, metavar="PID", help=text)
    text = "seconds for the whole run (default: %(default)g)"
    add_time("--seconds", default=limits.seconds, help=text)
    text = "seconds for an answer (default: %(default)g)"
    add_time("--timeout", default=limits.request_s, help=text)
    text = "seconds in which blocks must be free (default: %(default)g)"
    add_time("--idle-seconds", default=limits.idle_s, help=text)
    text = "kv_lease_duration of the prefill engines, in seconds (default: %(default)g)"
    add_time("--lease-seconds", default=limits.lease_s, help=text)
    text = "--block-size of the engines (default: what their metrics say, else 16)"
    add(
        "--block-size",
        type=whole_number("a number of tokens", 1, _MOST_BLOCK),
        metavar="TOKENS",
        help=text,
    )
    add("--seed", type=int, metavar="N", help="seed of the prompts (default: a new one each time)")
    text = "run only this check or group (see --list); repeat it for more"
    add_list("--only", metavar="NAME", help=text)
    text = "leave out this check or group; repeat it for more"
    add_list("--skip", metavar="NAME", help=text)
    add("--list", action="store_true", help="print the checks and stop")
    text = "write a report to this file: .html, .md or .json"
    add_list("--report", metavar="FILE", help=text)
    for name, variable in _KEYS.items():
        text = f"file with the API key for --{name} (default: ${variable})"
        add(f"--{name}-key-file", metavar="FILE", help=text)
    text = "PEM file with the only authorities to trust for https URLs"
    add("--ca", metavar="FILE", help=text)
    text = "name that the certificates of https engines must have (default: the host of each URL)"
    add("--engine-server-name", metavar="NAME", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the suite; return the exit code: 0 all green, 1 findings, 2 it could not run."""
    if args.list:
        sys.stdout.write(
            "".join(f"{check.group:10} {check.name:22} {check.about}\n" for check in ALL_CHECKS)
        )
        return 0
    try:
        checks = _check_flags(args)
        running = _Running()
        # an engine may be frozen, and a second Ctrl-C would end its thaw
        ends = on_end_signals(running.interrupt, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with ends, _started(args) as children:
            report = asyncio.run(running.until_ended(_prove(args, checks, children)))
        sys.stdout.write(f"{report.verdict}\n")
        for path in args.report:
            _write(path, report)
    except (ConfigError, CheckAborted, ChildFailed) as exc:
        # words of engines may be in it
        sys.stderr.write(f"pdrelay prove: {printable(shortened(str(exc)))}\n")
        return COULD_NOT_RUN
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("pdrelay prove: interrupted; no page was written\n")
        return COULD_NOT_RUN
    return report.exit_code


def _check_flags(args: argparse.Namespace) -> list[Check]:
    if bool(args.prefill) != bool(args.decode) or not (args.prefill or args.router):
        raise ConfigError(
            "name engines of both roles (--prefill URL --decode URL), or a router (--router URL)"
        )
    for path in args.report:
        if Path(path).suffix not in _WRITERS:
            raise ConfigError(f"--report {path}: its name must end in {', '.join(_WRITERS)}")
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--report {path}: its folder does not exist")
    try:
        return chosen(args.only, args.skip)
    except KeyError as exc:
        raise ConfigError(f"{exc.args[0]} is neither a check nor a group: see --list") from exc


class _Running:
    """Ends on a signal: cancels the run, or raises KeyboardInterrupt before and after it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[RunReport] | None = None

    async def until_ended(self, run: Coroutine[object, object, RunReport]) -> RunReport:
        """Run it; raises CancelledError after a signal."""
        self._task = asyncio.ensure_future(run)
        try:
            return await self._task
        finally:
            self._task = None

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """End the run with its cleanups."""
        if self._task is None:
            raise KeyboardInterrupt
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)


@contextmanager
def _started(args: argparse.Namespace) -> Generator[list[Child]]:
    """Start the commands of --start, and stop them at the end."""
    if not args.start:
        yield []
        return
    logs = Path(tempfile.mkdtemp(prefix="pdrelay-prove-"))
    sys.stderr.write(f"pdrelay prove: logs of what is started: {logs}\n")
    with open_fleet(logs, grace_s=_GRACE_S) as fleet:
        yield [
            fleet.start(Command(f"start-{number}", ("/bin/sh", "-c", command), os.environ, ""))
            for number, command in enumerate(args.start)
        ]


async def _prove(
    args: argparse.Namespace, checks: Sequence[Check], children: Sequence[Child]
) -> RunReport:
    async with open_transport(_tls(args)) as transport:
        servers = _servers(args, transport)
        await _wait_ready(servers, args.start_seconds if children else 0.0, children)
        return await _measure(args, checks, servers, rest_s=args.idle_seconds if children else 0.0)


async def _measure(
    args: argparse.Namespace, checks: Sequence[Check], servers: Servers, *, rest_s: float
) -> RunReport:
    """``rest_s``: seconds until the engines must be at rest.

    A command of --start may send a request first, as ``pdrelay up`` does.
    """
    began = now()
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    seed = SystemRandom().randrange(10**9) if args.seed is None else args.seed
    bench = await _bench(args, servers, seed)
    notes = [await _at_rest(bench, now() + rest_s), await bench.calibrate()]
    for note in notes:
        sys.stderr.write(f"{note}\n")
    samples = UsageSamples(began)
    reports = await run_checks(bench, checks, samples, _Progress(len(checks), began, bench).report)
    return RunReport(
        subject=f"{bench.service.name}, model {bench.facts.name}",
        reference="nothing" if bench.reference is None else bench.reference.name,
        version=version("pdrelay"),
        when=when,
        seed=seed,
        seconds=now() - began,
        tolerance=bench.tolerance,
        notes=notes,
        checks=reports,
        loads=bench.loads,
        usage=samples.by_engine,
    )


async def _bench(args: argparse.Namespace, servers: Servers, seed: int) -> Bench:
    front = servers.router or servers.decode[0]
    facts = await _facts(front, args.model)
    pairs = EnginePairs(servers.prefill, servers.decode, facts.name)
    service: Service = pairs if servers.router is None else SingleServer(servers.router, facts.name)
    # The default reference is a prefill engine: it computes whole prompts itself, and reads no KV.
    alone = servers.reference or (servers.prefill[0] if servers.prefill else None)
    commands = {
        (role, deed): command
        for role in _ROLES
        for deed in Deed
        if (command := getattr(args, f"{deed}_{role}"))
    }
    pids = {role: pid for role in _ROLES if (pid := getattr(args, f"{role}_pid")) is not None}
    bench = Bench(
        service=service,
        reference=None if alone is None else SingleServer(alone, facts.name),
        router=servers.router,
        prefill=servers.prefill,
        decode=servers.decode,
        facts=facts,
        block_size=args.block_size or _DEFAULT_BLOCK,
        limits=Limits(args.timeout, args.idle_seconds, args.lease_seconds, args.seconds),
        peers=Peers(commands, pids),
        prompts=new_prompts(seed),
    )
    if args.block_size is None:
        sizes = [
            holdings.block_size
            for server in bench.engines
            if (holdings := await bench.holdings(server)) is not None
        ]
        bench.block_size = next((size for size in sizes if size is not None), _DEFAULT_BLOCK)
    return bench


async def _facts(server: HttpServer, model: str | None) -> ModelFacts:
    reply = await server.get("/v1/models", timeout_s=_QUICK_S)
    if reply.failure():
        raise CheckAborted(f"{server.name} at {server.url} lists no models: {reply.failure()}")
    try:
        return read_models(reply.body, model)
    except Malformed as exc:
        raise CheckAborted(f"{server.name} at {server.url}: {exc}") from exc


async def _at_rest(bench: Bench, deadline: float) -> str:
    """Raise CheckAborted if an engine is busy before the run; return a note for the report."""
    unknown: list[str] = []
    for server in bench.engines:
        holdings = await wait_rest(bench, server, deadline)
        if holdings is None:
            unknown.append(server.name)
            continue
        bench.usual[server.name] = holdings
        if excess := holdings.beyond(None):
            raise CheckAborted(
                f"{server.name} at {server.url} is not at rest: {excess}. Take other clients away "
                f"first"
            )
    if not bench.engines:
        return (
            "Blocks are not watched: name the engines behind the router, too (--prefill, --decode)."
        )
    return (
        f"Without vLLM's metrics: {', '.join(unknown)}." if unknown else "All engines are at rest."
    )


async def _wait_ready(servers: Servers, seconds: float, children: Sequence[Child]) -> None:
    """Wait until all serve; raises CheckAborted."""
    deadline = now() + seconds
    while True:
        replies = await asyncio.gather(
            *(server.get("/health", timeout_s=_QUICK_S) for server in servers.all)
        )
        missing = [
            (server, reply)
            for server, reply in zip(servers.all, replies, strict=True)
            if reply.failure()
        ]
        if not missing:
            return
        for child in children:
            if child.exit_code:  # a command that ended with 0 may have started a daemon
                child.raise_if_dead()
        if now() >= deadline:
            server, reply = missing[0]
            raise CheckAborted(f"{server.name} at {server.url} does not serve: {reply.failure()}")
        await asyncio.sleep(_POLL_S)


class _Progress:
    """Writes a line for each check to standard error, and a line of progress on a terminal."""

    def __init__(self, checks: int, began: float, bench: Bench) -> None:
        self._checks = checks
        self._began = began
        self._bench = bench

    def report(self, number: int, check: Check, report: CheckReport | None) -> None:
        """Report a check that begins (None), or its result."""
        is_terminal = sys.stderr.isatty()
        if report is not None:
            sys.stderr.write(f"{chr(13) + chr(27) + '[K' if is_terminal else ''}{line(report)}\n")
        elif is_terminal:
            spent = f"{now() - self._began:.0f} of {self._bench.limits.seconds:.0f} s"
            sys.stderr.write(f"\r\x1b[K[{number}/{self._checks}] {check.name} ... {spent}")
        sys.stderr.flush()


def _servers(args: argparse.Namespace, transport: Transport) -> Servers:
    def named(name: str, url: str, kind: str) -> HttpServer:
        tls_name = None if kind == "router" else args.engine_server_name
        return HttpServer(name, server_url(url), transport, _key(args, kind), server_name=tls_name)

    return Servers(
        router=None if args.router is None else named("router", args.router, "router"),
        prefill=[
            named(f"prefill-{number}", url, "prefill") for number, url in enumerate(args.prefill)
        ],
        decode=[named(f"decode-{number}", url, "decode") for number, url in enumerate(args.decode)],
        reference=None
        if args.reference is None
        else named("reference", args.reference, "reference"),
    )


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    urls = [*args.prefill, *args.decode, *filter(None, (args.router, args.reference))]
    if args.engine_server_name is not None and dns_name(args.engine_server_name) is None:
        raise ConfigError(f"--engine-server-name {args.engine_server_name!r} is not a DNS name")
    if not any(url.startswith("https://") for url in urls):
        for flag, value in (("--ca", args.ca), ("--engine-server-name", args.engine_server_name)):
            if value is not None:
                raise ConfigError(f"{flag} is for URLs that begin with https://, and there is none")
        return None
    context = ssl.create_default_context()
    if args.ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # these authorities and no others
        try:
            context.load_verify_locations(cadata=read_text(args.ca))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"--ca {args.ca} has no certificate in PEM") from exc
    return context


def _key(args: argparse.Namespace, name: str) -> str | None:
    path: str | None = getattr(args, f"{name}_key_file")
    if path is not None:
        return outbound_key(read_text(path), path)
    key = os.environ.get(_KEYS[name], "")
    return outbound_key(key, f"${_KEYS[name]}") if key else None


def _write(path: str, report: RunReport) -> None:
    """Write a report for this user alone: prompts and addresses may be in it."""
    try:
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(_WRITERS[Path(path).suffix](report))
    except OSError as exc:
        raise ConfigError(f"--report {path} cannot be written: {exc.strerror}") from exc
