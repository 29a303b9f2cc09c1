"""Listening sockets; each worker has one at the same address, and the kernel spreads connections
over them.
"""

import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from pdrelay_proxy.errors import ConfigError

EVERYWHERE: Final = "::"  # every address of the machine, those of IPv4 included
# elsewhere SO_REUSEPORT is missing, or one socket gets all connections
_CAN_SHARE_PORTS: Final = sys.platform.startswith("linux")


def url_of(host: str, port: int, *, is_tls: bool) -> str:
    """Return the URL of a listening address, for people."""
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def reserved(host: str, port: int) -> Generator[int]:
    """Reserve a port for workers, and yield its number.

    Raises ConfigError: it is taken, not permitted, or cannot be shared.
    """
    if not _CAN_SHARE_PORTS:
        raise ConfigError(
            f"workers above 1 need Linux, and this is {sys.platform}: write workers = 1"
        )
    with ExitStack() as stack:
        for family, address in _addresses(host, port):
            # fails if the port is taken: with SO_REUSEPORT, two routers would share it in silence
            _bound(family, address, shared=False).close()
        sockets = [stack.enter_context(listener) for listener in bound(host, port)]
        yield int(sockets[0].getsockname()[1])


def bound(host: str, port: int, *, shared: bool = True) -> Sequence[socket.socket]:
    """Bind a socket to each address of a host; nothing arrives until ``listen`` is called.

    Raises ConfigError. ``shared``: other processes may have sockets at the same address, too.
    """
    with ExitStack() as stack:
        sockets = list[socket.socket]()
        for family, address in _addresses(host, port):
            if not port and sockets:  # the system chose a port for the first address
                address = (address[0], int(sockets[0].getsockname()[1]))
            sockets.append(stack.enter_context(_bound(family, address, shared=shared)))
        stack.pop_all()
        return sockets


def _bound(family: int, address: tuple[str, int], *, shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != EVERYWHERE)
            )
        listener.bind(address)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"the router cannot listen at {address[0]} port {address[1]}: {exc.strerror}"
        ) from exc
    return listener


def _addresses(host: str, port: int) -> Sequence[tuple[int, tuple[str, int]]]:
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise ConfigError(f"{host} is no address to listen at: {exc.strerror}") from exc
    return list(
        dict.fromkeys((int(entry[0]), (str(entry[4][0]), int(entry[4][1]))) for entry in entries)
    )
