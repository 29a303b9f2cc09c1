"""Questions about IP addresses."""

import ipaddress


def plain_ip(text: str) -> str:
    """Return an IP address in one form: IPv4-mapped IPv6 (RFC 4291) as IPv4, without a zone.

    Other text is returned unchanged.
    """
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def is_loopback(ip: str) -> bool:
    """Whether an IP address is only reached from this machine."""
    try:
        return ipaddress.ip_address(plain_ip(ip)).is_loopback
    except ValueError:
        return False


def is_own_host(host: str) -> bool:
    """Whether a host is this machine: ``localhost``, a loopback address, or all addresses."""
    name = host.lower().rstrip(".")
    if name in {"localhost", "localhost.localdomain"} or name.endswith(".localhost"):
        return True
    try:
        ip = ipaddress.ip_address(plain_ip(name.strip("[]")))
    except ValueError:
        return False
    return ip.is_unspecified or ip.is_loopback


def is_elsewhere(reached: str, own: str) -> bool:
    """Whether a connection leads to another machine: ``own`` is the IP address at our end of it."""
    return not is_loopback(reached) and plain_ip(reached) != plain_ip(own)


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host
