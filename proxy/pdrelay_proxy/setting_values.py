"""Parses the value of a setting, whether it was a flag, a line of a file or a variable."""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Final

from pdrelay_proxy.core.address import dns_name
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.http.address_allowlist import AllowList
from pdrelay_proxy.core.http.allowed_origins import is_origin
from pdrelay_proxy.declarations import Kind
from pdrelay_proxy.errors import AddressError
from pdrelay_proxy.io.routing_plugins import installed_policies

_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+")
_SESSION_NAME: Final = re.compile(
    r"[A-Za-z0-9_-]{1,64}|body:[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64})?"
)
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER: Final = re.compile(r"[-+.0-9eE]{1,40}")


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
