"""Sockets to listen on; workers have one each at the same address, and the kernel spreads
connections over them.
"""

import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from pdrelay_proxy.errors import ConfigError

EVERYWHERE: Final = "::"  # every address of the machine, those of IPv4 included
# elsewhere the option is missing, or all goes to one of them
_SPREADS: Final = sys.platform.startswith("linux")


def url_of(host: str, port: int, *, is_tls: bool) -> str:
    """Return where something listens, for people."""
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def reserved(host: str, port: int) -> Generator[int]:
    """Keep a port for workers, and yield its number; raises ConfigError: it is taken, not ours, or
    cannot be shared.
    """
    if not _SPREADS:
        raise ConfigError(
            f"workers above 1 need Linux, and this is {sys.platform}: write workers = 1"
        )
    with ExitStack() as stack:
        for family, where in _addresses(host, port):
            # fails if it is taken: with the option on, two routers would share the port in silence
            _bound(family, where, shared=False).close()
        sockets = [stack.enter_context(one) for one in bound(host, port)]
        yield int(sockets[0].getsockname()[1])


def bound(host: str, port: int, *, shared: bool = True) -> Sequence[socket.socket]:
    """Bind a socket to each address of a host; nothing arrives before somebody listens on them.

    Raises ConfigError.

    ``shared``: other processes may have sockets at the same address, too.
    """
    with ExitStack() as stack:
        sockets = list[socket.socket]()
        for family, where in _addresses(host, port):
            if not port and sockets:  # the system has chosen one for the first address
                where = (where[0], int(sockets[0].getsockname()[1]))
            sockets.append(stack.enter_context(_bound(family, where, shared=shared)))
        stack.pop_all()
        return sockets


def _bound(family: int, where: tuple[str, int], *, shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != EVERYWHERE))
        one.bind(where)
    except OSError as exc:
        one.close()
        raise ConfigError(
            f"the router cannot listen at {where[0]} port {where[1]}: {exc.strerror}"
        ) from exc
    return one


def _addresses(host: str, port: int) -> Sequence[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise ConfigError(f"{host} is no address to listen at: {exc.strerror}") from exc
    return list(dict.fromkeys((int(one[0]), (str(one[4][0]), int(one[4][1]))) for one in found))
