"""``pdrelay``: from the command line to a subcommand, whose modules are loaded only then."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

from pdrelay_proxy.commands.interrupts import INTERRUPTED, ctrl_c_ends_at_once
from pdrelay_proxy.features import feature_commands

# the router's own commands: the module that declares the flags, a summary
_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "serve": ("pdrelay_proxy.commands.serve", "run the router in front of running engines"),
    "instances": (
        "pdrelay_proxy.commands.instances",
        "list, add, drain, change and remove the engines of a running router",
    ),
}
# commands of other packages: the extra that has it, a summary
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
# of entry points: a tool's module is the entry point with its name
_GROUP: Final = "pdrelay.commands"
_INSTALL: Final = {
    "tools": "pip install 'pdrelay[tools]' or, in a checkout, pip install . ./tools",
    "connector": "pip install 'pdrelay[connector]' or, in a checkout, pip install '.[connector]'",
}
_UNREAD: Final = 141  # exit code, as shells have it for SIGPIPE
# commands whose flags cannot be abbreviated
_EXACT: Final = ("serve", "up", "check", "chat", "prove", "doctor")
# Packages of the extra named proxy (pyproject.toml).
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
    """Reports errors in one sentence, without the page of usage that would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(  # type: ignore[override]  # (argparse's has overloads)
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Report an unknown flag first: argparse would take its value for a command."""
        self._check_flags(args or ())
        return super().parse_known_args(args, namespace or argparse.Namespace())

    def _check_flags(self, words: Sequence[str]) -> None:
        flags = self._option_string_actions
        commands = {
            name
            for option in self._actions
            if option.nargs == argparse.PARSER
            for name in option.choices or ()
        }
        for word in words:
            flag = word.partition("=")[0]
            if flag == "--" or word in commands:  # the following words belong to the command
                return
            is_abbreviation = self.allow_abbrev and any(option.startswith(flag) for option in flags)
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
    """Prints the version and ends; neither router nor engine need be installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from pdrelay_proxy.io.build import find_build  # noqa: PLC0415 (it may run git)

        sys.stdout.write(f"pdrelay {find_build()}\n")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not sys.stdout:  # the shell has closed it (>&-)
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (to the end)
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # a test's stream has none
    if reconfigure is not None:
        # an engine's words may have letters that the terminal's encoding has not
        reconfigure(errors="replace")
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # `head` has read enough; without this the interpreter would flush the rest, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD


def _run(arguments: Sequence[str]) -> int:
    try:
        with ctrl_c_ends_at_once():
            # a shell completes the command line; its hook needs the package argcomplete
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
    """Split off the arguments that `pdrelay up` passes to engines, behind the first --."""
    if arguments[:1] != ["up"] or "--" not in arguments:
        return arguments, ()
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Declare the subcommands; only the given one loads its modules and has its flags."""
    parser = _Parser(
        prog="pdrelay",
        description="A prefill/decode router for vLLM, and tools for its engines.",
        allow_abbrev=False,
    )
    version_help = "print the version, the commit, and whether the request path is compiled"
    parser.add_argument("-V", "--version", action=_ShowVersion, nargs=0, help=version_help)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    feature_modules = feature_commands()
    own = {**_COMMANDS, **feature_modules}
    everything = {**own, **_TOOLS}
    chosen = next((word for word in arguments if word in everything), None)
    for name, (location, summary) in everything.items():
        command = commands.add_parser(
            name, help=summary, allow_abbrev=name not in {*_EXACT, *feature_modules}
        )
        if name == chosen:
            module = (
                importlib.import_module(location)
                if name in own
                else _load_tool(name, command, location)
            )
            add_arguments: Callable[[argparse.ArgumentParser], None] = module.add_arguments
            add_arguments(command)
    return parser


def _load_tool(name: str, command: argparse.ArgumentParser, extra: str) -> ModuleType:
    """Return the module of a tool's entry point, or end with the command that installs it."""
    from importlib.metadata import entry_points  # noqa: PLC0415 (the router's own commands do not need it)

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
