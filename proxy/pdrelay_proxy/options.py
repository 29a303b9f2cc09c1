"""Reads the settings that people write: environment, configuration file and flags.

Later ones take precedence.
"""

import argparse
import difflib
import itertools
import logging
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, cast, get_args

from pdrelay_proxy.core.address import dns_name
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.http.address_allowlist import AllowList
from pdrelay_proxy.core.http.allowed_origins import is_origin
from pdrelay_proxy.core.routing.kv_reuse import reused_kv
from pdrelay_proxy.declarations import Kind, Option
from pdrelay_proxy.errors import AddressError, ConfigError
from pdrelay_proxy.features import feature_policies, feature_settings, features
from pdrelay_proxy.io.files import read_text
from pdrelay_proxy.io.routing_plugins import installed_policies
from pdrelay_proxy.settings import FIRST, PolicyName, Settings, policy_kind

logger = logging.getLogger(__name__)
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+")
_SESSION_NAME: Final = re.compile(
    r"[A-Za-z0-9_-]{1,64}|body:[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64})?"
)
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER: Final = re.compile(r"[-+.0-9eE]{1,40}")
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"))
_WORDS: Final[Mapping[type, str]] = {
    str: "a string, in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of Settings, or of a feature's settings."""

    owner: type[object]
    name: str
    default: object
    kind: Kind
    option: Option

    @property
    def flag(self) -> str:
        """Its argument."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    def value(self, settings: Settings) -> object:
        """Return its value in a router's settings."""
        setting_value: object = getattr(
            settings if self.owner is Settings else settings.for_feature(self.owner), self.name
        )
        return setting_value

    @property
    def is_list(self) -> bool:
        """Whether it may have several values."""
        return isinstance(self.default, tuple)

    @property
    def default_text(self) -> str:
        """Its default as people write it, with the unit."""
        if self.default is None or self.is_list:
            return self.option.unset
        if not isinstance(self.default, int | float) or isinstance(self.default, bool):
            return str(self.default).lower()
        for size, unit in _SIZES if self.kind.unit == "B" else ():
            if self.default >= size:
                return f"{self.default / size:g} {unit}"
        number = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{number} {self.kind.unit}".rstrip()


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
    """Build the settings; raises ConfigError: the file cannot be read, or a value is not
    allowed.
    """
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


def reused_of_features() -> Mapping[str, object]:
    """Return the values that ``reuse_kv`` gives to settings of features."""
    return {
        name: setting.option.reused.value
        for name, setting in OPTIONS.items()
        if setting.option.reused is not None
    }


def unused_of_features(settings: Settings) -> Sequence[str]:
    """Return sentences about those with their defaults: the KV that a router does not use."""
    return [
        f"{setting.option.reused.unused} ({name})"
        for name, setting in OPTIONS.items()
        if setting.option.reused is not None and setting.value(settings) == setting.default
    ]


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


def read_file(path: str) -> Mapping[str, object]:
    """Read a file; return values by the names of settings.

    Raises ConfigError: it is not TOML, or a key or value is wrong.
    """
    return {name: _line(path, name, value) for name, value in _file_values(path).items()}


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


def needs_restart(old: Settings, new: Settings) -> list[str]:
    """Return the names of differing settings that take effect only at a restart."""
    fixed = [name for name, setting in OPTIONS.items() if not setting.option.live]
    return [name for name in fixed if OPTIONS[name].value(old) != OPTIONS[name].value(new)]


def without_restart(old: Settings, new: Settings) -> tuple[Settings, Sequence[str]]:
    """Return the new settings as far as a running router can apply them, and the names of those
    that need a restart.
    """
    fixed = needs_restart(old, new)
    return with_values(new, {name: OPTIONS[name].value(old) for name in fixed}), fixed


def with_values(settings: Settings, values: Mapping[str, object]) -> Settings:
    """Return settings with other values, by the names of settings."""
    by_owner: dict[type[object], dict[str, Any]] = {}
    for name, value in values.items():
        by_owner.setdefault(_BY_NAME[name].owner, {})[name] = value
    changed = replace(settings, **by_owner.pop(Settings, {}))
    chosen = [
        _replaced(changed.for_feature(owner), new_values) for owner, new_values in by_owner.items()
    ]
    return changed.with_features(*chosen) if chosen else changed


def _replaced(feature_settings_value: object, values: Mapping[str, Any]) -> object:
    """Return the settings of a feature with other values."""
    return replace(cast("Any", feature_settings_value), **values)


def check_engines(settings: Settings, config: str | None) -> None:
    """Accept a router that has engines or can get some.

    Raises:
        ConfigError: no engine can ever come: the arguments do not change, and there is no key to
            add one with.
    """
    if config is None and not _has_engines(settings):
        raise ConfigError(
            "there are no engines, and none can be added: write --prefill and --decode, or set "
            "ADMIN_API_KEY to add "
            "engines with pdrelay instances"
        )


def warn_without_engines(settings: Settings, config: str | None) -> None:
    """Warn if only the configuration file can bring engines, by SIGHUP."""
    if not _has_engines(settings):
        text = (
            "there are no engines, and requests get 503: write prefill and decode into %s and send "
            "SIGHUP"
        )
        logger.warning(text, config)


def _has_engines(settings: Settings) -> bool:
    """Return whether there are engines, or some may come from discovery or operators."""
    keys = settings.admin_key, settings.admin_key_file, settings.join_key_file
    is_added_by_hand = any(key is not None for key in keys)
    finds_engines = any(feature.finds_engines(settings) for feature in features())
    is_named = bool(settings.prefill or settings.decode)
    return is_named or is_added_by_hand or finds_engines


def read(kind: Kind, text: str) -> object:
    """Parse a value; raises ArgumentTypeError, with the text and the expected form."""
    try:
        value = _value(kind, text)
    except (AddressError, ValueError) as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    if value is None:
        sentence = (
            f"{text!r} is not {kind.right}"
            if kind.right
            else "it is empty: leave it out or write a value"
        )
        raise argparse.ArgumentTypeError(sentence)
    return value


def _read_flag(setting: Setting, text: str) -> object:
    """Parse a flag's value; an error is reported later, in argparse's format."""
    try:
        return read(setting.kind, text)
    except argparse.ArgumentTypeError as exc:
        return WrongFlag(f"argument {setting.flag}: {exc}")


def _value(kind: Kind, text: str) -> object | None:
    if kind.is_open and text not in kind.choices:
        return _CHECKS[kind.metavar](text)
    if kind.choices:
        return (
            (text == "true" if kind.value_type is bool else kind.value_type(text))
            if text in kind.choices
            else None
        )
    if kind.value_type is str:
        check = kind.check or _CHECKS.get(kind.metavar)
        return text or None if check is None else check(text)
    try:
        number: float = kind.value_type(text) if _NUMBER.fullmatch(text) else kind.most + 1
    except ValueError:
        return None
    return (
        number
        if kind.least <= number <= kind.most and (kind.above is None or number > kind.above)
        else None
    )


def _engine(text: str) -> str:
    Target.parse(text)
    return text


def _network(text: str) -> str:
    AllowList.parse((text,))
    return text


def _host(text: str) -> str | None:
    bare = text.removeprefix("[").removesuffix("]")
    return bare if text == "*" or _HOST_NAME.fullmatch(bare) else None


_CHECKS: Final[Mapping[str, Callable[[str], str | None]]] = {
    "ENGINE": _engine,
    "NETWORK": _network,
    "HOST": _host,
    "DNS_NAME": dns_name,
    "URL": lambda text: text if text.startswith(("http://", "https://")) else None,
    "POLICY": lambda text: text if text in installed_policies() else None,
    "HEADER_NAME": lambda text: text if _HEADER_NAME.fullmatch(text) else None,
    "ORIGIN": lambda text: text.removesuffix("/") if is_origin(text.removesuffix("/")) else None,
    "HEADER": lambda text: text if _SESSION_NAME.fullmatch(text) else None,
}


def _kind(annotation: Any) -> Kind:  # noqa: ANN401 (types of types have no type)
    """Return the kind of a field: its annotation (Annotated), a switch, a choice or a string."""
    for part in (annotation, *get_args(annotation)):
        if metadata := getattr(part, "__metadata__", ()):
            kind = cast("Kind", metadata[0])
            return (
                policy_kind((*PolicyName, *feature_policies()))
                if kind.metavar == "POLICY"
                else kind
            )
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        *others, last = annotation
        right = f"a choice: write {', '.join(others)} or {last}"
        return Kind(right, "{" + ",".join(annotation) + "}", annotation, choices=tuple(annotation))
    if annotation is bool:
        return Kind(
            "a switch: write true or false", "{true,false}", bool, choices=("true", "false")
        )
    return Kind("", "NAME")


def _declared(owner: Any) -> Sequence[Setting]:  # noqa: ANN401 (dataclasses have no type of their own)
    return [
        Setting(owner, f.name, f.default, _kind(f.type), f.metadata["option"])
        for f in fields(owner)
        if f.metadata
    ]


def _grouped(declared: Sequence[Setting]) -> Sequence[Setting]:
    """Sort settings so that those of a group follow each other, whatever declares them."""
    groups = [*dict.fromkeys([setting.option.group for setting in declared])]
    return sorted(declared, key=lambda setting: groups.index(setting.option.group))


DECLARED: Final = _grouped(
    [setting for owner in (Settings, *feature_settings()) for setting in _declared(owner)]
)
_BY_NAME: Final[Mapping[str, Setting]] = {setting.name: setting for setting in DECLARED}
OPTIONS: Final[Mapping[str, Setting]] = {
    setting.name: setting for setting in DECLARED if not setting.option.environment
}
SECRETS: Final[Mapping[str, Setting]] = {
    setting.name: setting for setting in DECLARED if setting.option.environment
}
