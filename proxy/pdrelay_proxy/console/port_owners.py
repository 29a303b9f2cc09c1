"""The users whose processes listen on a port of this machine, by Linux' public tables."""

import re
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

_TABLES: Final = ("tcp", "tcp6")
# A listening socket (state 0A): its port in hexadecimal digits, and its owner (Linux,
# net/ipv4/tcp_ipv4.c).
_LISTENING: Final = re.compile(
    r"^ *\d+: [0-9A-F]+:(?P<port>[0-9A-F]{4}) [0-9A-F]+:0000 0A \S+ \S+ \S+ +(?P<user>\d+) ",
    re.MULTILINE,
)


def port_owners(port: int, *, tables: Path = Path("/proc/net")) -> AbstractSet[int] | None:
    """Return the ids of the users who listen on a TCP port, at any address; None: this system has
    no such tables.
    """
    users: set[int] = set()
    texts = [text for name in _TABLES if (text := _read(tables / name)) is not None]
    for text in texts:
        users.update(
            int(row["user"]) for row in _LISTENING.finditer(text) if int(row["port"], 16) == port
        )
    return users if texts else None


def why_not_of(user: int, port: int, owners: AbstractSet[int] | None) -> str | None:
    """Return why a port does not belong to one user alone; None: it does.

    All addresses count: localhost has two.
    """
    if owners is None:
        return f"this system does not say who listens on port {port}"
    if not owners:
        return f"nothing listens on port {port}"
    others = ", ".join(str(owner) for owner in sorted(owners - {user}))
    return f"a process of another user (uid {others}) listens on port {port}" if others else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # no Linux, or no IPv6
        return None
