"""Where engines may be that are added at run time: the router would connect to any address that it
is given.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Self, TypeAlias

_Ip: TypeAlias = IPv4Address | IPv6Address
_Network: TypeAlias = IPv4Network | IPv6Network
EXPECTED: Final = (
    "a network such as 10.0.0.0/8, an address, a name such as d0.example, or *.example for all "
    "below it"
)
_NAME: Final = re.compile(r"(?:\*\.)?(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
# Loopback, and the private networks of RFC 1918, 6598 and 4193: where engines are.
STANDARD: Final = (
    "127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10",
        "fc00::/7",
)  # fmt: skip
# No engine is there, but cloud metadata services are, which hand out credentials: only an entry
# inside such a network opens it. Link-local (RFC 3927, 4291), "this host", multicast, and metadata
# services with addresses of their own.
_NEVER: Final = tuple(
    ip_network(text)
    for text in (
        "169.254.0.0/16", "fe80::/10", "0.0.0.0/8", "::/128", "224.0.0.0/4", "240.0.0.0/4",
            "ff00::/8",
        "100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32", "fd00:ec2::254/128",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AllowList:
    """Networks, and names whose owners are trusted with their addresses."""

    networks: tuple[_Network, ...]
    names: tuple[str, ...] = ()  # in lower case; .example stands for *.example

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """Parse the entries; without any, the standard ones.

        Raises:
            ValueError: one is neither a network nor a name.
        """
        networks = list[_Network]()
        names = list[str]()
        for entry in entries or STANDARD:
            network = _network(entry)
            if network is not None:
                networks.append(network)
            elif _NAME.fullmatch(entry) and not _ends_in_number(entry):
                names.append(entry.lower().removesuffix(".").removeprefix("*"))
            else:
                raise ValueError(f"{entry!r} is not a place of engines: write {EXPECTED}")
        return cls(tuple(networks), tuple(names))

    def admits_name(self, host: str) -> bool:
        """Return whether a name is listed, itself or by its ending."""
        host = host.lower().removesuffix(".")
        return any(
            host == name or (name.startswith(".") and host.endswith(name)) for name in self.names
        )

    def admits(self, host: str, address: str) -> bool:
        """Return whether an engine may be at ``address``, an IP address to which ``host`` leads."""
        ip = plain_ip(address)
        for never in _NEVER:
            if ip in never:
                return any(
                    _is_within(network, never) and ip in network for network in self.networks
                )
        return self.admits_name(host) or any(ip in network for network in self.networks)


def is_ip(host: str) -> bool:
    """Return whether a host is an IP address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def plain_ip(text: str) -> _Ip:
    """Parse an IP address; ::ffff:127.0.0.1 is 127.0.0.1 (RFC 4291, 2.5.5.2). Raises ValueError."""
    ip = ip_address(text)
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


def _network(entry: str) -> _Network | None:
    try:
        return ip_network(entry)
    except ValueError:
        return None


def _is_within(inner: _Network, outer: _Network) -> bool:
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)


def _ends_in_number(text: str) -> bool:
    last = text.rstrip(".").rpartition(".")[2]
    return last.isdigit() or last[:2].lower() == "0x"
