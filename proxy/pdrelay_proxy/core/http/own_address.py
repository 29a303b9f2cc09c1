"""Whether an engine is on the caller's own host."""

from collections.abc import Sequence

from pdrelay_proxy.core.http.address_allowlist import plain_ip


def is_own_address(caller: str, addresses: Sequence[str]) -> bool:
    """Return whether an engine at these IP addresses is at the caller's.

    All of them have to match: a name with several addresses belongs to none of their hosts.
    Loopback addresses count as one host, the router's.
    """
    return bool(addresses) and all(_is_same_host(caller, address) for address in addresses)


def _is_same_host(caller: str, address: str) -> bool:
    try:
        caller_ip = plain_ip(caller)
        ip = plain_ip(address)
    except ValueError:  # a caller over something else than IP
        return False
    return caller_ip == ip or (caller_ip.is_loopback and ip.is_loopback)
