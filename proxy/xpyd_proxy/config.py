"""Settings out of the defaults, the configuration file, the command line and the environment; the later ones win."""

import argparse
import difflib
import itertools
import os
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.files import read_text
from xpyd_proxy.options import OPTIONS, SECRETS, Setting, read
from xpyd_proxy.settings import FIRST, Kind, Settings

_WORDS: Final[Mapping[type, str]] = {
    str: "a string, in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for every option. What is not given stays out of the namespace: the file may say it."""
    parser.formatter_class = partial(argparse.HelpFormatter, max_help_position=36)
    parser.usage = "xpyd serve --prefill URL... --decode URL... [--config FILE] [OPTION VALUE]..."
    parser.epilog = "From the environment: " + "; ".join(
        f"{one.option.environment} ({one.option.help})" for one in SECRETS.values()
    )
    for group, options in itertools.groupby(OPTIONS.values(), lambda one: one.option.group):
        part = parser.add_argument_group(group.title)
        for one in options:
            _add(part.add_argument, one)
        if group is FIRST:
            part.add_argument("--config", metavar="FILE", help="TOML, with these names as keys (connect_timeout_s = 5)")


def settings(args: argparse.Namespace) -> Settings:
    """Put the settings together; reads the configuration file if there is one.

    Raises:
        ConfigError: the file cannot be read, or says something that is not allowed.
    """
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in OPTIONS}
    found: Mapping[str, Any] = {} if args.config is None else read_file(args.config)
    both = {**_standard(), **found, **given}
    chosen: dict[str, Any] = {name: tuple(value) if OPTIONS[name].is_list else value for name, value in both.items()}
    return Settings(**chosen, **_environment())


def read_file(path: str) -> Mapping[str, object]:
    """Read a configuration file: values by the names of the settings.

    Raises:
        ConfigError: it cannot be read, is not TOML, has an unknown key or a wrong value.
    """
    try:
        found: dict[str, object] = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    return {name: _line(path, name, value) for name, value in found.items()}


def needs_restart(old: Settings, new: Settings) -> list[str]:
    """Name the settings that differ and take effect only when the router is started."""
    fixed = [name for name, one in OPTIONS.items() if not one.option.live]
    return [name for name in fixed if getattr(old, name) != getattr(new, name)]


def _add(add: Callable[..., argparse.Action], one: Setting) -> None:
    more: dict[str, Any] = {"nargs": "+", "action": "extend"} if one.is_list else {}
    action = add(
        one.flag,
        dest=one.name,
        type=partial(_argument, one.kind),
        default=argparse.SUPPRESS,
        metavar=one.kind.metavar,
        help=f"{one.option.help} (default: {one.default_text})",
        **more,
    )
    if one.kind.choices:
        action.completer = lambda **_: one.kind.choices  # type: ignore[attr-defined]


def _argument(kind: Kind, text: str) -> object:
    try:
        return read(kind, text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _line(path: str, name: str, value: object) -> object:
    """Check one line of the file."""
    if name in SECRETS:
        variable = SECRETS[name].option.environment
        raise ConfigError(f"{path}: {name} is not a setting of the file: put it into the environment as {variable}")
    if name not in OPTIONS:
        raise ConfigError(f"{path}: {name} is not a setting{_nearest(name)}")
    if not OPTIONS[name].is_list:
        return _one(path, name, value)
    if not isinstance(value, list):
        raise ConfigError(f"{path}: {name} is {value!r}: write a list")
    return [_one(path, name, one) for one in cast("list[object]", value)]


def _one(path: str, name: str, value: object) -> object:
    kind = OPTIONS[name].kind
    written = kind.value_type if kind.value_type in _WORDS else str  # an enum is a string
    if type(value) is not written and (written, type(value)) != (float, int):
        raise ConfigError(f"{path}: {name} is {value!r}: write {_WORDS[written]}")
    try:
        return read(kind, str(value).lower() if isinstance(value, bool) else str(value))
    except ValueError as exc:
        raise ConfigError(f"{path}: {name}: {exc}") from exc


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), OPTIONS, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else ""


def _standard() -> dict[str, str]:
    """Return what every program with OpenTelemetry reads in the environment; a file or an argument says it better."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return {"otlp_endpoint": endpoint} if endpoint else {}


def _environment() -> dict[str, Any]:
    """Return the secrets, which are never arguments: ps would show those."""
    found = {name: os.environ.get(one.option.environment) for name, one in SECRETS.items()}
    return {name: value for name, value in found.items() if value}
