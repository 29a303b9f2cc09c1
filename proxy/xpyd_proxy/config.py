"""Settings out of the defaults, the configuration file, the command line and the environment; the later ones win."""

import argparse
import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from xpyd_proxy.errors import ConfigError
from xpyd_proxy.io.files import read_text
from xpyd_proxy.options import OPTIONS, Option
from xpyd_proxy.settings import Settings

_DEFAULT: Final = Settings()
SECRETS: Final[Mapping[str, str]] = {  # settings that come from the environment alone
    "admin_key": "ADMIN_API_KEY",
    "prefill_api_key": "XPYD_PREFILL_API_KEY",
    "decode_api_key": "XPYD_DECODE_API_KEY",
    "cache_salt_secret": "XPYD_CACHE_SALT_SECRET",
}
_WORDS: Final[Mapping[type, str]] = {
    str: "a string, in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
_BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for every option. What is not given stays out of the namespace: the file may say it."""
    for option in OPTIONS:
        _add(parser, option)
    parser.add_argument("--config", metavar="FILE", help="TOML, with these names as keys (connect_timeout_s = 5)")


def settings(args: argparse.Namespace) -> Settings:
    """Put the settings together; reads the configuration file if there is one.

    Raises:
        ConfigError: the file cannot be read, or says something that is not allowed.
    """
    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in _BY_NAME}
    found: Mapping[str, Any] = {} if args.config is None else read_file(args.config)
    both = {**_standard(), **found, **given}
    chosen: dict[str, Any] = {name: tuple(value) if _BY_NAME[name].many else value for name, value in both.items()}
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
    return {name: _value(path, name, value) for name, value in found.items()}


def needs_restart(old: Settings, new: Settings) -> list[str]:
    """Name the settings that differ and take effect only when the router is started."""
    return [option.name for option in OPTIONS if not option.live and _of(old, option) != _of(new, option)]


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    default, kind = _of(_DEFAULT, option), option.kind
    more: dict[str, Any] = {"nargs": "+", "action": "extend"} if option.many else {}
    parser.add_argument(
        option.argument,
        dest=option.name,
        type=_argument(option),
        default=argparse.SUPPRESS,
        metavar="{" + ",".join(kind.choices) + "}" if kind.choices else kind.metavar,
        help=option.help if option.many or default is None else f"{option.help} ({default})",
        **more,
    )


def _argument(option: Option) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            return option.kind.read(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return read


def _value(path: str, name: str, value: object) -> object:
    """Check one line of the file."""
    option = _BY_NAME.get(name)
    if name in SECRETS:
        raise ConfigError(
            f"{path}: {name} is not a setting of the file: put it into the environment as {SECRETS[name]}"
        )
    if option is None:
        raise ConfigError(f"{path}: {name} is not a setting{_nearest(name)}")
    if not option.many:
        return _one(path, option, value)
    if not isinstance(value, list):
        raise ConfigError(f"{path}: {name} is {value!r}: write a list")
    return [_one(path, option, one) for one in cast("list[object]", value)]


def _one(path: str, option: Option, value: object) -> object:
    kind = option.kind
    if not isinstance(value, kind.written) or (isinstance(value, bool) and kind.written is not bool):
        expected = kind.written if isinstance(kind.written, type) else kind.written[-1]
        raise ConfigError(f"{path}: {option.name} is {value!r}: write {_WORDS[expected]}")
    try:
        return kind.read(str(value).lower() if isinstance(value, bool) else str(value))
    except ValueError as exc:
        raise ConfigError(f"{path}: {option.name}: {exc}") from exc


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), _BY_NAME, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else ""


def _of(settings: Settings, option: Option) -> object:
    value: object = getattr(settings, option.name)
    return value


def _standard() -> dict[str, str]:
    """Return what every program with OpenTelemetry reads in the environment; a file or an argument says it better."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return {"otlp_endpoint": endpoint} if endpoint else {}


def _environment() -> dict[str, Any]:
    """Return the secrets, which are never arguments: ps would show those."""
    found = {name: os.environ.get(variable) for name, variable in SECRETS.items()}
    return {name: value for name, value in found.items() if value}
