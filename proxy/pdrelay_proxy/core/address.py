"""The address of an engine, as operators write it."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Self

from pdrelay_proxy.errors import AddressError, BadPort

EXPECTED = (
    "host:port or http(s)://host:port, such as 127.0.0.1:8100, engine.example:8100 or [::1]:8100"
)

_SHAPE = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[^\[\]]*\]|[^:/\[\]]*):(?P<port>[^/:]*)/?", re.IGNORECASE
)
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_DIGITS = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class Address:
    """A scheme, a host and a port; two spellings of one address are equal."""

    scheme: str
    host: str  # IPv6 without its brackets
    port: int

    def __hash__(self) -> int:
        # a dataclass's own __hash__ is not compiled by mypyc
        return hash((self.scheme, self.host, self.port))

    @property
    def authority(self) -> str:
        """``host:port``, with brackets around IPv6."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return f"{self.scheme}://{self.authority}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address; raises BadPort (a number outside 1..65535), else AddressError."""
        shape = _SHAPE.fullmatch(text)
        if shape is None:
            raise AddressError(f"{text!r} is not the address of an engine: write {EXPECTED}")
        host = _host(shape["host"])
        if host is None or not _DIGITS.fullmatch(shape["port"]):
            raise AddressError(f"{text!r} is not the address of an engine: write {EXPECTED}")
        port = int(shape["port"])
        if not 0 < port < 65536:
            raise BadPort(f"{text!r} has port {port}, and a port is between 1 and 65535")
        return cls((shape["scheme"] or "http").lower(), host, port)


def dns_name(text: str) -> str | None:
    """Return the normal spelling of a name that certificates can have; None: it is none, for
    instance an IP address.
    """
    normal = _host(text)
    is_name = normal == text.lower() and not text.endswith(".") and _ip(IPv4Address, text) is None
    return normal if is_name else None


def _host(text: str) -> str | None:
    """Return the normal spelling of an IP address or a DNS name; None if it is neither."""
    if text.startswith("["):
        return _ip(IPv6Address, text[1:-1])
    labels = text.removesuffix(".").split(".")
    # no name ends in a number (RFC 3696, 2), so it is IPv4
    if labels[-1].isdigit() or labels[-1][:2].lower() == "0x":
        return _ip(IPv4Address, text)
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    return text.lower()


def _ip(ip_type: type[IPv4Address | IPv6Address], text: str) -> str | None:
    try:
        ip = ip_type(text)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return str(ip if mapped is None else mapped)  # ::ffff:10.0.0.1 is 10.0.0.1
