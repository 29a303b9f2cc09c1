"""Whether an engine is at the host that calls."""

from collections.abc import Sequence

from pdrelay_proxy.core.http.address_allowlist import plain_ip


def is_own_address(caller: str, places: Sequence[str]) -> bool:
    """Tell whether an engine that is at these IP addresses is at the caller's.

    All of them have to be: a name that leads to several hosts belongs to none of them. Addresses of
    loopback are one host, that of the router.
    """
    return bool(places) and all(_is_same_host(caller, place) for place in places)


def _is_same_host(one: str, other: str) -> bool:
    try:
        first = plain_ip(one)
        second = plain_ip(other)
    except ValueError:  # a caller over something else than IP
        return False
    return first == second or (first.is_loopback and second.is_loopback)
