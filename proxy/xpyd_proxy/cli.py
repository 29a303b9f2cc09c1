"""``xpyd``: the command line, to settings, to a running server."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from xpyd_proxy import supervisor
from xpyd_proxy.commands import instances, pairs, why
from xpyd_proxy.core.http.origins import check_open
from xpyd_proxy.core.workers.limit_shares import share_of
from xpyd_proxy.errors import AlreadyKnown, ConfigError
from xpyd_proxy.io import logs
from xpyd_proxy.io.workers.context import WorkerContext, own_place
from xpyd_proxy.options import add_arguments, check_engines, serve_settings
from xpyd_proxy.settings import Settings


class _Parser(argparse.ArgumentParser):
    """Complains in one sentence; the usage is a page that hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(  # type: ignore[override]  # (argparse's has overloads)
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Name an unknown flag first: argparse would take its value for a command, or ask for the right flag."""
        if not any(action.nargs == argparse.REMAINDER for action in self._actions):
            self._check_flags(args or ())
        return super().parse_known_args(args, namespace or argparse.Namespace())

    def _check_flags(self, words: Sequence[str]) -> None:
        flags = self._option_string_actions
        commands = {name for one in self._actions if one.nargs == argparse.PARSER for name in one.choices or ()}
        for word in words:
            flag = word.partition("=")[0]
            if flag == "--" or word in commands:  # what follows is no flag, or one of the command
                return
            is_abbreviation = self.allow_abbrev and any(one.startswith(flag) for one in flags)
            if flag.startswith("--") and " " not in word and flag not in flags and not is_abbreviation:
                close = difflib.get_close_matches(flag.replace("_", "-"), flags, n=1)
                self.error(f"unrecognized arguments: {flag}{f': did you mean {close[0]}?' if close else ''}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could follow, and has the extra that its hook comes with
        import argcomplete  # noqa: PLC0415

        argcomplete.autocomplete(build_parser(os.environ["COMP_LINE"].split()[1:]))
    args = build_parser(arguments).parse_args(arguments)
    args.command_line = arguments
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Declare the subcommands; ``serve`` does not load what others need (``up``, ``plan``, ``prove``, ...)."""
    parser = _Parser(
        prog="xpyd", description="A prefill/decode router for vLLM, and tools for its engines.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    serve = commands.add_parser("serve", help="run the router in front of running engines", allow_abbrev=False)
    add_arguments(serve)
    serve.set_defaults(run=_serve)
    up = commands.add_parser(
        "up", help="start vLLM or simulated engines and the router on this machine, to try them", allow_abbrev=False
    )
    instances.add_arguments(
        commands.add_parser("instances", help="list, add, drain, change and remove the engines of a running router")
    )
    why.add_arguments(commands.add_parser("why", help="show where the time of one request went", allow_abbrev=False))
    pairs.add_arguments(
        commands.add_parser("pairs", help="show which prefill and decode engines work together at a running router")
    )
    plan = commands.add_parser("plan", help="compute how many prefill and decode engines your traffic needs")
    replay = commands.add_parser("replay", help="compare routing policies on a trace, with simulated engines")
    prove = commands.add_parser(
        "prove", help="test running engines from outside and report what is wrong", allow_abbrev=False
    )
    doctor = commands.add_parser("doctor", help="examine the network between two engine hosts", allow_abbrev=False)
    if arguments[:1] == ["up"]:
        from xpyd_proxy.local.up import add_arguments as add_up_arguments  # noqa: PLC0415

        add_up_arguments(up)
    if arguments[:1] == ["plan"]:
        from xpyd_proxy.planning.command import add_arguments as add_plan_arguments  # noqa: PLC0415

        add_plan_arguments(plan)
    if arguments[:1] == ["replay"]:
        from xpyd_proxy.planning.replay.command import add_arguments as add_replay_arguments  # noqa: PLC0415

        add_replay_arguments(replay)
    if arguments[:1] == ["prove"]:
        from xpyd_proxy.proving.command import add_arguments as add_prove_arguments  # noqa: PLC0415

        add_prove_arguments(prove)
    if arguments[:1] == ["doctor"]:
        from xpyd_proxy.commands.doctor import add_arguments as add_doctor_arguments  # noqa: PLC0415

        add_doctor_arguments(doctor)
    return parser


def _serve(args: argparse.Namespace) -> int:
    place = own_place()
    try:
        settings = serve_settings(args)
        if place is None and settings.workers > 1:
            check_open(settings)
            share_of(settings, 0, settings.workers)  # a limit that cannot be shared is said here, and at once
            logs.configure(settings.log_level, settings.log_format)
            check_engines(settings, args.config)
            return supervisor.run(settings, args.command_line)
        return _serve_here(args, place)
    except (ConfigError, AlreadyKnown) as exc:
        sys.stderr.write(f"xpyd serve: {exc}{': name every engine once' if isinstance(exc, AlreadyKnown) else ''}\n")
        return 2


def _serve_here(args: argparse.Namespace, place: WorkerContext | None) -> int:
    """Serve in this process, alone or as one of several workers; raises ConfigError and AlreadyKnown."""
    from xpyd_proxy import server  # noqa: PLC0415 (a supervisor needs none of it: a third of its memory)
    from xpyd_proxy.app import build  # noqa: PLC0415

    def again() -> Settings:
        settings = serve_settings(args)
        return settings if place is None else share_of(settings, place.number, place.of)

    if place is not None and not place.may_begin():
        return 0
    settings = again()
    router = build(settings, place=place)
    logs.configure(settings.log_level, settings.log_format)
    if place is None:  # else the supervisor has
        check_engines(settings, args.config)
    return server.run(router, settings, again=again, place=place)


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main())
