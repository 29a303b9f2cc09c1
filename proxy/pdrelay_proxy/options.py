"""Reads the settings that people write: environment, configuration file and flags.

Later ones take precedence.
"""

import argparse
import difflib
import itertools
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from pdrelay_proxy.core.routing.kv_reuse import reused_kv
from pdrelay_proxy.declarations import Kind
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.io.files import read_text
from pdrelay_proxy.known_settings import OPTIONS, SECRETS, Setting, reused_of_features, with_values
from pdrelay_proxy.setting_values import read
from pdrelay_proxy.settings import FIRST, Settings

_WORDS: Final[Mapping[type, str]] = {
    str: "a string, in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for every option.

    An absent flag stays out of the namespace: the file may have the setting.
    """
    parser.formatter_class = partial(argparse.HelpFormatter, max_help_position=36)
    parser.usage = (
        "pdrelay serve --prefill URL... --decode URL... [--config FILE] [OPTION VALUE]..."
    )
    parser.epilog = "Secrets are never flags. From the environment: " + "; ".join(
        f"{setting.option.environment} ({setting.option.help})" for setting in SECRETS.values()
    )
    file = (
        "TOML file with options as keys, such as connect_timeout_s = 5; flags override it "
        "(default: none)"
    )
    for group, options in itertools.groupby(OPTIONS.values(), lambda setting: setting.option.group):
        part = parser.add_argument_group(group.title)
        for setting in options:
            _add_flag(part.add_argument, setting)
        if group is FIRST:
            part.add_argument("--config", metavar="FILE", help=file)


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Declare the flags of some options, for another command that uses them."""
    for name in names:
        _add_flag(parser.add_argument, OPTIONS[name])


def _add_flag(add: Callable[..., argparse.Action], setting: Setting) -> None:
    more: dict[str, Any] = {"nargs": "+", "action": "extend"} if setting.is_list else {}
    action = add(
        setting.flag,
        dest=setting.name,
        type=partial(_read_flag, setting),
        default=argparse.SUPPRESS,
        metavar=setting.kind.metavar,
        help=f"{setting.option.help}{_open_choices(setting.kind)} (default: {setting.default_text})",
        **more,
    )
    if choices := setting.kind.choices:
        action.completer = lambda choices=choices, **_: choices  # type: ignore[attr-defined]


def _open_choices(kind: Kind) -> str:
    """Name the choices if there may be more; otherwise the metavar has them."""
    return f": {', '.join(kind.choices)}, or one that is installed" if kind.is_open else ""


@dataclass(frozen=True, slots=True)
class WrongFlag:
    """Takes the place of an invalid value of a flag, so that all errors are reported at once."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen value of a setting, and its source."""

    value: object
    source: str  # a flag, a file or a variable


@dataclass(frozen=True, slots=True)
class Choices:
    """All chosen values; other settings have their defaults.

    ``wrong``: sentences, by the name in the file.
    """

    right: Mapping[str, Choice]
    wrong: Mapping[str, str]

    def settings(self) -> Settings:
        """Return the settings, with defaults in place of wrong values."""
        return with_values(Settings(), {name: choice.value for name, choice in self.right.items()})


def serve_settings(args: argparse.Namespace) -> Settings:
    """Build the settings; raises ConfigError: a file cannot be read, or a value is wrong."""
    choices = choose(args)
    for sentence in choices.wrong.values():
        raise ConfigError(sentence)
    return choices.settings()


def choose(args: argparse.Namespace) -> Choices:
    """Read environment, file and flags, of which later ones take precedence; raises ConfigError:
    the file is not TOML.
    """
    right = dict[str, Choice]()
    wrong = dict[str, str]()
    for name, setting in OPTIONS.items():
        variable = setting.option.variable
        if variable and (text := os.environ.get(variable)):
            right[name] = Choice(text, variable)
    file: str | None = args.config
    parts = [*([] if file is None else [_choices_of_file(file)]), _choices_of_flags(args)]
    for part in parts:
        for name, choice in part.items():
            right.pop(name, None)
            wrong.pop(name, None)
            if isinstance(choice, Choice):
                right[name] = choice
            else:
                wrong[name] = choice
    if "reuse_kv" in right and right["reuse_kv"].value:
        chosen = {name: choice.value for name, choice in right.items()}
        source = f"reuse_kv ({right['reuse_kv'].source})"
        more = reused_kv(chosen, reused_of_features(), feature_policies())
        right |= {name: Choice(value, source) for name, value in more.items() if name not in wrong}
    for name, setting in SECRETS.items():  # never arguments, which ps shows
        if secret := os.environ.get(setting.option.environment):
            right[name] = Choice(secret, setting.option.environment)
    return Choices(right, wrong)


def _choices_of_file(path: str) -> Mapping[str, Choice | str]:
    """Read a file; return choices or errors by the names of settings."""
    choices = dict[str, Choice | str]()
    for name, value in _file_values(path).items():
        try:
            choices[name] = _choice(name, _line(path, name, value), path)
        except ConfigError as exc:
            choices[name] = str(exc)
    return choices


def _choices_of_flags(args: argparse.Namespace) -> Mapping[str, Choice | str]:
    choices = dict[str, Choice | str]()
    flag_values: Mapping[str, object] = vars(args)
    for name in [name for name in OPTIONS if name in flag_values]:
        value = flag_values[name]
        wrong = [
            flag_value.sentence
            for flag_value in _several(value)
            if isinstance(flag_value, WrongFlag)
        ]
        choices[name] = wrong[0] if wrong else _choice(name, value, OPTIONS[name].flag)
    return choices


def _choice(name: str, value: object, source: str) -> Choice:
    return Choice(tuple(_several(value)) if OPTIONS[name].is_list else value, source)


def _several(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _file_values(path: str) -> Mapping[str, object]:
    try:
        values: dict[str, object] = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    return values


def _line(path: str, name: str, value: object) -> object:
    """Check one line of the file."""
    if name in SECRETS:
        variable = SECRETS[name].option.environment
        raise ConfigError(
            f"{path}: {name} is not a setting of the file: put it into the environment as "
            f"{variable}"
        )
    if name not in OPTIONS:
        if _is_table(value):
            raise ConfigError(
                f"{path}: [{name}] is not a setting: settings are keys outside of tables, so leave "
                f"this line out and "
                "write its keys above all tables, such as port = 8000"
            )
        close = difflib.get_close_matches(name.replace("-", "_"), OPTIONS, n=1)
        raise ConfigError(
            f"{path}: {name} is not a setting{f': did you mean {close[0]}?' if close else ''}"
        )
    if not OPTIONS[name].is_list:
        return _checked(path, name, value)
    if not isinstance(value, list):
        raise ConfigError(f"{path}: {name} is {value!r}: write a list")
    return [_checked(path, name, item) for item in cast("list[object]", value)]


def _is_table(value: object) -> bool:
    """Return whether a value is a table, or an array of tables."""
    if isinstance(value, list):
        items = cast("list[object]", value)
        return bool(items) and isinstance(items[0], dict)
    return isinstance(value, dict)


def _checked(path: str, name: str, value: object) -> object:
    kind = OPTIONS[name].kind
    # TOML writes an enum as a string
    written = kind.value_type if kind.value_type in _WORDS else str
    if type(value) is not written and (written, type(value)) != (float, int):
        raise ConfigError(f"{path}: {name} is {value!r}: write {_WORDS[written]}")
    try:
        return read(kind, str(value).lower() if isinstance(value, bool) else str(value))
    except argparse.ArgumentTypeError as exc:
        raise ConfigError(f"{path}: {name}: {exc}") from exc


def _read_flag(setting: Setting, text: str) -> object:
    """Parse a flag's value; an error is reported later, in argparse's format."""
    try:
        return read(setting.kind, text)
    except argparse.ArgumentTypeError as exc:
        return WrongFlag(f"argument {setting.flag}: {exc}")
