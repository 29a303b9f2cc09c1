"""The settings with all that is declared of them, and how one value is read that somebody has written."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, cast, get_args
from urllib.parse import urlsplit

from xpyd_proxy.core.fleet.target import Target
from xpyd_proxy.core.http.address_allowlist import AllowList
from xpyd_proxy.errors import AddressError
from xpyd_proxy.settings import Kind, Option, Settings

_NAME: Final = Kind("", "NAME")
_SWITCH: Final = Kind("a switch: write true or false", "{true,false}", bool, choices=("true", "false"))
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+")
_NUMBER: Final = re.compile(r"[-+.0-9eE]{1,40}")
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"))


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of Settings."""

    name: str
    default: object
    kind: Kind
    option: Option

    @property
    def flag(self) -> str:
        """Its argument."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

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


def read(kind: Kind, text: str) -> object:
    """Return the value that a text stands for.

    Raises:
        ValueError: it stands for none; the sentence names it and what would be right.
    """
    value = _value(kind, text)
    if value is not None:
        return value
    raise ValueError(f"{text!r} is not {kind.right}" if kind.right else "it is empty: leave it out or write a value")


def _value(kind: Kind, text: str) -> object | None:
    if kind.choices:
        return (text == "true" if kind.value_type is bool else kind.value_type(text)) if text in kind.choices else None
    if kind.value_type is str:
        return _CHECKS[kind.metavar](text) if kind.metavar in _CHECKS else text or None
    try:
        number: float = kind.value_type(text) if _NUMBER.fullmatch(text) else kind.most + 1
    except ValueError:
        return None
    return number if kind.least <= number <= kind.most and (kind.above is None or number > kind.above) else None


def _address(text: str) -> str:
    try:
        Target.parse(text)
    except AddressError as exc:
        raise ValueError(str(exc)) from exc
    return text


def _network(text: str) -> str:
    AllowList.parse((text,))
    return text


def _host(text: str) -> str | None:
    bare = text.removeprefix("[").removesuffix("]")
    return bare if text == "*" or _HOST_NAME.fullmatch(bare) else None


def _url(text: str) -> str | None:
    return text if text.startswith(("http://", "https://")) else None


def _store(text: str) -> str | None:
    kind, _, where = text.partition(":")
    if urlsplit(text).password is not None:
        raise ValueError("a store's URL is shown by ps: put its password into the environment as XPYD_REDIS_PASSWORD")
    return text if text == "memory" or (where and kind in ("file", "kubernetes", "redis", "rediss", "unix")) else None


_CHECKS: Final[Mapping[str, Callable[[str], str | None]]] = {
    "ENGINE": _address,
    "NETWORK": _network,
    "HOST": _host,
    "URL": _url,
    "STORE": _store,
}


def _kind(annotation: Any) -> Kind:  # noqa: ANN401 (types of types have no type)
    """Return how a field's type is written: it says so (Annotated), or it is a switch, a choice or a text."""
    for part in (annotation, *get_args(annotation)):
        if found := getattr(part, "__metadata__", ()):
            return cast("Kind", found[0])
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        *others, last = annotation
        right = f"a choice: write {', '.join(others)} or {last}"
        return Kind(right, "{" + ",".join(annotation) + "}", annotation, choices=tuple(annotation))
    return _SWITCH if annotation is bool else _NAME


DECLARED: Final = [Setting(f.name, f.default, _kind(f.type), f.metadata["option"]) for f in fields(Settings)]
OPTIONS: Final[Mapping[str, Setting]] = {one.name: one for one in DECLARED if not one.option.environment}
SECRETS: Final[Mapping[str, Setting]] = {one.name: one for one in DECLARED if one.option.environment}
