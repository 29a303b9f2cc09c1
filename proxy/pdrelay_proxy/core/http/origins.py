"""The web sites from which a browser may send requests: only the router's own, if no key protects
it.

A page of any site can have a browser send a POST to an internal address (cross-site request
forgery), and a page whose name is suddenly resolved to such an address can read the answers, too
(DNS rebinding). Requests of the first name their origin in Origin and Sec-Fetch-Site (W3C Fetch
Metadata), those of the second have the page's own name in Host.
"""

import ipaddress
import re
from typing import Final

from pdrelay_proxy.core.http.framing import shown_text
from pdrelay_proxy.core.model import Headers
from pdrelay_proxy.errors import ConfigError, CrossSite, Misdirected
from pdrelay_proxy.settings import Settings

ANY: Final = "*"
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})
# Names that cannot be registered: RFC 6761 (localhost), 6762 (local), 8375 (home.arpa), ICANN 2024
# (internal), Kubernetes.
_INSIDE: Final = (".localhost", ".local", ".home.arpa", ".internal", ".svc")
_HOST: Final = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::[0-9]{0,5})?")
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_KNOWN_MOST: Final = 64
_KNOWN_BYTES: Final = 256


class Sites:
    """The names that the router accepts; ``own_name``: its machine's."""

    def __init__(self, settings: Settings, own_name: str = "localhost") -> None:
        self._names = frozenset(
            {settings.host.lower(), own_name.lower(), *map(str.lower, settings.allowed_hosts)}
        )
        self._is_local = is_loopback(settings.host)
        self._is_restricted = bool(settings.allowed_hosts)
        # a browser would refuse a certificate for another name
        self._is_tls = settings.tls_cert is not None
        self._known: set[bytes] = set()  # values of Host that are good with or without keys

    def check(self, method: str, headers: Headers, *, has_keys: bool) -> None:
        """Accept a request, as far as a browser may have sent it; ``has_keys``: clients must send
        one.

        Raises:
            Misdirected: its Host is not a name of this router.
            CrossSite: a page of another site has sent it.
        """
        for name, value in headers:
            if name == b"host" and not self.admits(value, has_keys=has_keys):
                raise Misdirected(
                    f"this router is not {shown_text(value)}: ask it by its address, "
                    "or name the host in allowed_hosts"
                )
        if not has_keys and method not in _READING:
            _check_origin(dict(headers))

    def admits(self, host: bytes, *, has_keys: bool) -> bool:
        """Return whether a Host header names this router."""
        if host in self._known:
            return True
        if ANY in self._names or ((has_keys or self._is_tls) and not self._is_restricted):
            return True
        name = _name_of(host)
        is_good = name is not None and (
            name in self._names or (name in _LOCAL if self._is_local else _is_inside(name))
        )
        if is_good and len(host) <= _KNOWN_BYTES and len(self._known) < _KNOWN_MOST:
            self._known.add(host)
        return is_good


def check_open(settings: Settings) -> None:
    """Accept a router that other machines cannot reach, that identifies its clients, or that is
    open on purpose.

    The same goes for its admin port, which shows engines and metrics.

    Raises:
        ConfigError: it is none of these.
    """
    if settings.allowed_origins and settings.api_keys_file is None:
        raise ConfigError(
            "allowed_origins needs api_keys_file: any page could use the engines without a key"
        )
    knows_clients = settings.api_keys_file is not None or settings.tls_client_ca is not None
    if knows_clients or settings.allow_unauthenticated:
        return
    remedy = "set api_keys_file (or tls_client_ca), or allow_unauthenticated to true if they may"
    if not is_loopback(settings.host):
        raise ConfigError(
            f"host is {settings.host}, so others could use the engines without a key: {remedy}"
        )
    admin_host = settings.admin_host or settings.host
    if settings.admin_port is not None and not is_loopback(admin_host):
        raise ConfigError(
            f"admin_host is {admin_host}, so others could see the engines without a key: {remedy}"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name_of(host: bytes) -> str | None:
    """Return the name or address in a Host header, without its port; None: it has neither."""
    match = _HOST.fullmatch(host.strip(b" \t"))
    if match is None:
        return None
    return (match[1] or match[2]).decode("ascii").lower().removesuffix(".")


def _is_inside(name: str) -> bool:
    """Return whether this is an IP address, or a name that no web site can have."""
    if "." not in name or name.endswith(_INSIDE):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_origin(headers: dict[bytes, bytes]) -> None:
    fetch_site = headers.get(b"sec-fetch-site")
    if fetch_site is not None:
        if fetch_site in (b"same-origin", b"none"):
            return
    else:
        origin = headers.get(b"origin")
        if (
            origin is None
            or origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()
        ):
            return
    raise CrossSite(
        "a page of another web site has sent this request: a router without API keys takes none of "
        "those, "
        "so set api_keys_file, or ask it from a page of its own address"
    )
