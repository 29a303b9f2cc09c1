"""The command line of ``pdrelay doctor``: returns 0 (no findings), 1 (findings) or 2 (an error)."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from pdrelay_connector.core.checkpoint import digest_config
from pdrelay_connector.core.doctor.block_bytes import ModelShape, read_shape
from pdrelay_connector.core.doctor.diagnoses import diagnose
from pdrelay_connector.core.doctor.examination import shortened
from pdrelay_connector.core.doctor.finding import Finding
from pdrelay_connector.core.doctor.router_times import diagnose_router
from pdrelay_connector.core.ids import Address
from pdrelay_connector.core.messages import Fingerprint
from pdrelay_connector.errors import ConnectorError, SettingsError, UnreadableCheckpoint
from pdrelay_connector.io.checkpoint_files import (
    WEIGHT_PATTERNS,
    digest_weights,
    read_json,
    weight_files,
)
from pdrelay_connector.settings import (
    HOST_VARIABLE,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    Mode,
    Settings,
    read_settings,
)

DEFAULT_PORT: Final = 5690  # of a waiting end; engines begin at 5600
DEFAULT_BLOCK_BYTES: Final = 32768  # 16 tokens of 4 heads of 128 values of 2 bytes, K and V
WALL_CLOCK: Final[Callable[[], float]] = time.time  # noqa: TID251 (clocks of machines are compared)
LISTEN: Final = "listen"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="listen|HOST[:PORT]",
        help="listen: wait for the other host; HOST[:PORT]: examine a listening one",
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="[ID@]HOST:PORT",
        help="side channel of a running engine",
    )
    parser.add_argument(
        "--router", metavar="URL", help="running router, whose measured handoffs are compared"
    )
    parser.add_argument(
        "--lease-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="kv_lease_duration, in seconds (default: %(default)s)",
    )
    _add_end_arguments(parser)
    _add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def _add_end_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="",
        help=(
            f"address of this host (default: ${HOST_VARIABLE}, or the one that reaches the other "
            f"host)"
        ),
    )
    port = f"port to listen on (default: {DEFAULT_PORT} with listen, else the system chooses)"
    parser.add_argument("--port", type=int, default=None, help=port)
    parser.add_argument(
        "--once", action="store_true", help="with listen: stop after one examination"
    )
    parser.add_argument(
        "--secret-file",
        default="",
        metavar="FILE",
        help=f"file with the engines' secret (default: ${SECRET_FILE_VARIABLE})",
    )
    for name in ("tls-cert", "tls-key", "tls-ca", "tls-server-name"):
        parser.add_argument(f"--{name}", default="", help="as in kv_connector_extra_config")
    parser.add_argument(
        "--device", default="cpu", help="memory to transfer: cpu or cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--memory-mib",
        type=int,
        default=64,
        metavar="N",
        help="MiB of that memory (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds for each throughput (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds for each step (default: %(default)s)",
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-bytes",
        type=int,
        metavar="N",
        help=f"bytes of a descriptor (default: {DEFAULT_BLOCK_BYTES})",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="DIR",
        help="folder with a config.json; descriptors get the size of its blocks",
    )
    parser.add_argument(
        "--cache-dtype",
        default="auto",
        help="--kv-cache-dtype of the engines (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=16,
        metavar="N",
        help="--block-size of the engines, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks of an engine (default: %(default)s)",
    )
    mode = "mode of the engines' connector (default: %(default)s)"
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default="pull", help=mode)


def main(argv: Sequence[str] | None = None, *, wall: Callable[[], float] = WALL_CLOCK) -> int:
    """Run ``python -m pdrelay_connector.doctor``; return the exit code."""
    parser = _Parser(
        prog="pdrelay doctor",
        description="Examines the network between engines.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    return run(parser.parse_args(argv), wall=wall)


def run(args: argparse.Namespace, *, wall: Callable[[], float] = WALL_CLOCK) -> int:
    """Run with parsed arguments; return the exit code."""
    try:
        _check(args)
        return _run(args, wall)
    except KeyboardInterrupt:
        return 0 if args.target == LISTEN else 2
    except ModuleNotFoundError as exc:
        sys.stderr.write(
            f"pdrelay doctor: {exc.name} is not installed; install pdrelay[connector]\n"
        )
    except (ConnectorError, OSError) as exc:
        sys.stderr.write(f"pdrelay doctor: {shortened(str(exc))}\n")
    return 2


def _check(args: argparse.Namespace) -> None:
    if not (args.target or args.engine or args.router):
        raise SettingsError(
            "say what to examine: listen, HOST[:PORT], --engine HOST:PORT or --router URL"
        )
    for name, least, most in (
        ("memory_mib", 1, 1 << 16), ("seconds", 0.01, 15), ("timeout", 0.1, 15), ("block_size", 1, 1 << 20),
        ("tensor_parallel", 1, 1024), ("port", 0, 65535), ("lease_seconds", 0.5, 1e9),
    ):  # fmt: skip
        value: float | None = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise SettingsError(
                f"--{name.replace('_', '-')} must be between {least:g} and {most:g}"
            )
    if args.block_bytes is not None and not 1 <= args.block_bytes <= args.memory_mib << 20:
        raise SettingsError(
            f"--block-bytes must be between 1 and the memory ({args.memory_mib} MiB, --memory-mib)"
        )


def _run(args: argparse.Namespace, wall: Callable[[], float]) -> int:
    from pdrelay_connector.doctor import engines, pair, router, text  # noqa: PLC0415 (they need the extra's libraries)

    settings = _settings(args, os.environ)
    shape = _shape(args)
    request = pair.Request(
        settings,
        _address(args),
        args.memory_mib << 20,
        args.device,
        _fingerprint(args, shape),
        wall,
    )
    if args.target == LISTEN:
        pair.listen(request, once=args.once, say=_say)
        return 0
    report: dict[str, Any] = {}
    shown: list[str] = []
    findings: list[Finding] = []
    if args.target:
        order = pair.Examine(
            _block_bytes(args, shape), args.seconds, args.timeout, args.host, args.port or 0
        )
        facts = pair.examine(request, order)
        report["pair"] = facts
        shown.append(text.pair_text(facts))
        findings += diagnose(facts)
    if args.engine:
        looks = [engines.look_at(*_engine(flag), settings) for flag in args.engine]
        report["engines"] = [facts for facts, _ in looks]
        shown += [text.engine_text(facts) for facts, _ in looks]
        findings += engines.diagnose_engines(looks)
    if args.router:
        times = router.read_router(args.router, lease=args.lease_seconds)
        report["router"] = times
        shown.append(
            f"router {args.router}: {times.handoffs} hand-overs, {times.slow_handoffs} of them slow"
        )
        findings += diagnose_router(times)
    report["findings"] = findings
    if args.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(report)) + "\n")
    else:
        sys.stdout.write("\n".join([*shown, text.findings_text(findings)]) + "\n")
    return 1 if findings else 0


def _block_bytes(args: argparse.Namespace, shape: ModelShape | None) -> int:
    size = args.block_bytes or DEFAULT_BLOCK_BYTES
    if shape is not None and not args.block_bytes:
        size = shape.block_bytes(block_size=args.block_size, ranks=args.tensor_parallel)
    return size


def _settings(args: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    chosen = {
        name: getattr(args, name) for name in ("tls_cert", "tls_key", "tls_ca", "tls_server_name")
    }
    environment = dict(environment)
    if args.secret_file:
        environment.pop(SECRET_VARIABLE, None)
        environment[SECRET_FILE_VARIABLE] = args.secret_file
    return read_settings({name: value for name, value in chosen.items() if value}, environment)


def _address(args: argparse.Namespace) -> Address:
    """Return where to listen, or what to dial."""
    if args.target == LISTEN or not args.target:
        host = args.host or os.environ.get(HOST_VARIABLE, "localhost")
        return Address(host, DEFAULT_PORT if args.port is None else args.port)
    return _parsed(args.target, DEFAULT_PORT)


def _engine(text: str) -> tuple[str, Address]:
    engine, _, address = text.rpartition("@")
    return engine, _parsed(address, 5600)


def _parsed(text: str, port: int) -> Address:
    """Parse HOST, HOST:PORT or [IPv6]:PORT."""
    host, colon, number = text.rpartition(":")
    # a name, or an IPv6 address without brackets
    if not colon or (":" in host and not host.endswith("]")):
        host = text
        number = str(port)
    if not re.fullmatch("[0-9]{1,5}", number) or not 0 < int(number) < 65536 or not host:
        raise SettingsError(f"{text!r} is no HOST or HOST:PORT")
    return Address(host.strip("[]"), int(number))


def _shape(args: argparse.Namespace) -> ModelShape | None:
    if not args.model:
        return None
    return read_shape(_config(args), cache_dtype=args.cache_dtype)


def _fingerprint(args: argparse.Namespace, shape: ModelShape | None) -> Fingerprint | None:
    """Return the fingerprint of an engine with these flags, by its config.json, if given."""
    from pdrelay_connector.doctor.machine import package_version  # noqa: PLC0415 (as above)

    if shape is None:
        return None
    return Fingerprint(
        vllm=package_version("vllm"),
        dtype=shape.dtype,
        cache_dtype=args.cache_dtype,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.content // 2,
        groups="",
        attention="",
        mode=args.mode,
        config=digest_config(_config(args)),
        weights=_weights(Path(args.model)),
    )


def _config(args: argparse.Namespace) -> dict[str, Any]:
    path = Path(args.model)
    try:
        return read_json(path / "config.json" if path.is_dir() else path)
    except UnreadableCheckpoint as exc:
        raise SettingsError(f"--model: {exc}") from exc


def _weights(path: Path) -> str:
    """Return the digest of the weights as an engine states it; empty: the folder has none."""
    files = weight_files(path, WEIGHT_PATTERNS) if path.is_dir() else []
    try:
        return digest_weights(files) if files else ""
    except UnreadableCheckpoint as exc:
        raise SettingsError(f"--model: {exc}") from exc


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
