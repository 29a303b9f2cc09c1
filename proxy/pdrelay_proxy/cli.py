"""``pdrelay``: the command line, to a subcommand, whose modules are loaded only then."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Final, NoReturn

from pdrelay_proxy.commands.interrupts import INTERRUPTED, ctrl_c_ends_at_once
from pdrelay_proxy.features import feature_commands

# of the router: the module that declares the flags, what it does
_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "serve": ("pdrelay_proxy.commands.serve", "run the router in front of running engines"),
    "instances": (
        "pdrelay_proxy.commands.instances",
        "list, add, drain, change and remove the engines of a running router",
    ),
}
# beside the router: the extra that brings it, what it does
_TOOLS: Final[Mapping[str, tuple[str, str]]] = {
    "check": (
        "tools",
        "look in ten seconds whether engines are ready for traffic, with a request whose KV must "
        "move",
    ),
    "up": ("tools", "start vLLM or simulated engines and the router on this machine, to try them"),
    "chat": ("tools", "talk to a model through a running router, and see who served each answer"),
    "plan": ("tools", "compute how many prefill and decode engines your traffic needs"),
    "replay": ("tools", "compare routing policies on a trace, with simulated engines"),
    "prove": ("tools", "test running engines from outside and report what is wrong"),
    "doctor": ("connector", "examine the network between two engine hosts"),
}
# of entry points: a tool is the module behind the one with its name
_GROUP: Final = "pdrelay.commands"
_INSTALL: Final = {
    "tools": "pip install 'pdrelay[tools]' or, in a checkout, pip install . ./tools",
    "connector": "pip install 'pdrelay[connector]' or, in a checkout, pip install '.[connector]'",
}
# their flags are written in full
_EXACT: Final = ("serve", "up", "check", "chat", "prove", "doctor")
# What the extra named proxy brings (pyproject.toml).
_ROUTER_PACKAGES: Final = frozenset(
    {
        "fastapi",
        "httpcore",
        "httptools",
        "httpx",
        "prometheus_client",
        "pydantic",
        "starlette",
        "uvicorn",
        "uvloop",
    }
)


class _Parser(argparse.ArgumentParser):
    """Complains in one sentence; the usage is a page that hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(  # type: ignore[override]  # (argparse's has overloads)
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Name an unknown flag first: argparse would take its value for a command, or ask for the
        right flag.
        """
        self._check_flags(args or ())
        return super().parse_known_args(args, namespace or argparse.Namespace())

    def _check_flags(self, words: Sequence[str]) -> None:
        flags = self._option_string_actions
        commands = {
            name
            for one in self._actions
            if one.nargs == argparse.PARSER
            for name in one.choices or ()
        }
        for word in words:
            flag = word.partition("=")[0]
            if flag == "--" or word in commands:  # what follows is no flag, or one of the command
                return
            is_abbreviation = self.allow_abbrev and any(one.startswith(flag) for one in flags)
            if (
                flag.startswith("--")
                and " " not in word
                and flag not in flags
                and not is_abbreviation
            ):
                close = difflib.get_close_matches(flag.replace("_", "-"), flags, n=1)
                self.error(
                    f"unrecognized arguments: "
                    f"{flag}{f': did you mean {close[0]}?' if close else ''}"
                )


class _ShowVersion(argparse.Action):
    """Prints what runs here, and ends: neither router nor engine need be installed for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from pdrelay_proxy.io.build import find_build  # noqa: PLC0415 (it asks git)

        sys.stdout.write(f"pdrelay {find_build()}\n")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with ctrl_c_ends_at_once():
            # a shell asks what could follow, and has the extra of its hook
            if "_ARGCOMPLETE" in os.environ:
                import argcomplete  # noqa: PLC0415

                argcomplete.autocomplete(build_parser(os.environ["COMP_LINE"].split()[1:]))
            words, passed_on = _split_passed_on(arguments)
            args = build_parser(words).parse_args(words)
        args.command_line = arguments
        args.passed_on = passed_on
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in _ROUTER_PACKAGES:
            raise
        how = "pip install 'pdrelay[proxy]' or, in a checkout, pip install '.[proxy]'"
        sys.stderr.write(
            f"pdrelay: {package} is not installed, which comes with the extra for the router: "
            f"{how}\n"
        )
        return 2


def _split_passed_on(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Cut off what `pdrelay up` passes on to engines, which stands behind the first --."""
    if arguments[:1] != ["up"] or "--" not in arguments:
        return arguments, ()
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Declare the subcommands; only the one that is asked for loads its modules and has its
    flags.
    """
    parser = _Parser(
        prog="pdrelay",
        description="A prefill/decode router for vLLM, and tools for its engines.",
        allow_abbrev=False,
    )
    said = "print the version, the commit, and whether the request path is compiled"
    parser.add_argument("-V", "--version", action=_ShowVersion, nargs=0, help=said)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    of_features = feature_commands()
    own = {**_COMMANDS, **of_features}
    everything = {**own, **_TOOLS}
    asked = next((word for word in arguments if word in everything), None)
    for name, (place, what) in everything.items():
        command = commands.add_parser(
            name, help=what, allow_abbrev=name not in {*_EXACT, *of_features}
        )
        if name == asked:
            module = (
                importlib.import_module(place) if name in own else _load_tool(name, command, place)
            )
            add_arguments: Callable[[argparse.ArgumentParser], None] = module.add_arguments
            add_arguments(command)
    return parser


def _load_tool(name: str, command: argparse.ArgumentParser, extra: str) -> ModuleType:
    """Return the module behind a tool's entry point, or end and say what to install."""
    from importlib.metadata import entry_points  # noqa: PLC0415 (the router's own commands do without)

    missing = "this command"
    try:
        for point in entry_points(group=_GROUP, name=name):
            module: ModuleType = point.load()
            return module
    except ModuleNotFoundError as exc:
        missing = (exc.name or missing).partition(".")[0]
    sys.stderr.write(f"{command.prog}: {missing} is not installed: {_INSTALL[extra]}\n")
    raise SystemExit(2)


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main())
