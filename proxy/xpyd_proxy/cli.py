"""``xpyd``: the command line, to settings, to a running server."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from xpyd_proxy import config, server
from xpyd_proxy.app import build
from xpyd_proxy.commands import instances, plan
from xpyd_proxy.errors import AlreadyKnown, ConfigError
from xpyd_proxy.io import logs
from xpyd_proxy.settings import Settings


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
    config.add_arguments(serve)
    serve.set_defaults(run=_serve)
    up = commands.add_parser("up", help="start engines and the router on this machine", allow_abbrev=False)
    instances.add_arguments(commands.add_parser("instances", help="the engines of a running router"))
    plan.add_arguments(commands.add_parser("plan", help="how many prefill and decode engines a traffic needs"))
    if arguments[:1] == ["up"]:
        _add_up_arguments(up)
    return parser


def serve_settings(args: argparse.Namespace) -> Settings:
    """Turn parsed ``serve`` arguments, the configuration file and the environment into settings; raises ConfigError."""
    return config.settings(args)


def _serve(args: argparse.Namespace) -> int:
    try:
        settings = serve_settings(args)
        router = build(settings)
    except ConfigError as exc:
        sys.stderr.write(f"xpyd serve: {exc}\n")
        return 2
    except AlreadyKnown as exc:
        sys.stderr.write(f"xpyd serve: {exc}: name every engine once\n")
        return 2
    logs.configure(settings.log_level, settings.log_format)
    return server.run(router, settings, again=lambda: serve_settings(args))


def _add_up_arguments(parser: argparse.ArgumentParser) -> None:
    from xpyd_proxy.local import up  # noqa: PLC0415 (it brings libraries that a router does not need)

    up.add_arguments(parser)
    parser.set_defaults(run=up.run)


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main())
