"""``xpyd``: the command line, to settings, to a running server."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import uvicorn

from xpyd_proxy.app import create_app
from xpyd_proxy.core.address import EXPECTED, Address
from xpyd_proxy.errors import AddressError, AlreadyKnown
from xpyd_proxy.settings import ClientKvParams, Mode, Settings

_DEFAULT = Settings()
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class _Parser(argparse.ArgumentParser):
    """Complains in one sentence; the usage is a page that hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser(arguments).parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Declare the subcommands; those of ``up`` only when it is asked for, so that ``serve`` does not load it."""
    parser = _Parser(prog="xpyd", description="A prefill/decode router for vLLM.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    serve = commands.add_parser("serve", help="run the router in front of running engines", allow_abbrev=False)
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    up = commands.add_parser("up", help="start engines and the router on this machine", allow_abbrev=False)
    if arguments[:1] == ["up"]:
        _add_up_arguments(up)
    return parser


def serve_settings(args: argparse.Namespace) -> Settings:
    """Turn parsed ``serve`` arguments and the environment into settings."""
    return Settings(
        prefill=tuple(args.prefill),
        decode=tuple(args.decode),
        host=args.host,
        port=args.port,
        model=args.model,
        admin_key=os.environ.get("ADMIN_API_KEY") or None,  # never an argument: those are visible in ps
        client_kv_params=ClientKvParams(args.client_kv_params),
        mode=Mode(args.mode),
        retries=args.retries,
        max_body_bytes=args.max_body_bytes,
        connect_timeout_s=args.connect_timeout,
        prefill_timeout_s=args.prefill_timeout,
    )


def _serve(args: argparse.Namespace) -> int:
    settings = serve_settings(args)
    try:
        app = create_app(settings)
    except AlreadyKnown as exc:
        sys.stderr.write(f"xpyd serve: {exc}: name every engine once\n")
        return 2
    logging.basicConfig(level=args.log_level.upper(), format=_LOG_FORMAT)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line, with an address, for every leg
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,  # the router writes its own line for every request
        server_header=False,
        timeout_keep_alive=settings.client_keepalive_s,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
    )
    return 0


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for flag, text in (("--prefill", f"addresses of prefill engines: {EXPECTED}"), ("--decode", "the same for decode")):
        add(flag, type=_address, nargs="+", action="extend", default=[], metavar="URL", help=text)
    add("--host", default=_DEFAULT.host, help="interface to listen on (%(default)s)")
    add("--port", type=_port, default=_DEFAULT.port, help="TCP port to listen on, 0 for any free one (%(default)s)")
    add("--model", metavar="NAME", help="model that an engine added at run time must serve (that of the others)")
    add(
        "--client-kv-params",
        choices=[*ClientKvParams],
        default=_DEFAULT.client_kv_params,
        help="refuse a request that carries kv_transfer_params, or strip them (%(default)s)",
    )
    add(
        "--mode",
        choices=[*Mode],
        default=_DEFAULT.mode,
        help="pull: one leg after the other; push: both at once; auto: as each prefill engine says (%(default)s)",
    )
    add("--retries", type=_retries, default=_DEFAULT.retries, metavar="N", help="per request (%(default)s)")
    add("--max-body-bytes", type=_bytes, default=_DEFAULT.max_body_bytes, metavar="N", help="bytes (%(default)s)")
    add(
        "--connect-timeout",
        type=_seconds,
        default=_DEFAULT.connect_timeout_s,
        metavar="S",
        help="seconds (%(default)s)",
    )
    add(
        "--prefill-timeout",
        type=_seconds,
        default=_DEFAULT.prefill_timeout_s,
        metavar="S",
        help="seconds (%(default)s)",
    )
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info", help="(%(default)s)")


def _add_up_arguments(parser: argparse.ArgumentParser) -> None:
    from xpyd_proxy.local import up  # noqa: PLC0415 (it brings libraries that a router does not need)

    up.add_arguments(parser)
    parser.set_defaults(run=up.run)


def _address(text: str) -> str:
    try:
        Address.parse(text)
    except AddressError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return text


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port: write a number from 0 to 65535")


def _bytes(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a size: write a whole number of bytes, 1 or more")


def _retries(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= 10:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of retries: write one from 0 to 10")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 0 < seconds < float("inf"):
        return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a time: write a number of seconds above 0")


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main())
