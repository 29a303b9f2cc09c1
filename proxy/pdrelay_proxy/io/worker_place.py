"""One of several workers: its number, its line to the supervisor, and its settings.

Workers are routers of one machine. They listen on one port, are peers of each other on loopback,
and follow one store. Each has its own numbers, and so its own admin port.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.settings import Settings

# Messages on the line.
READY: Final = b"R"  # from a worker: it serves
END: Final = b"E"  # from the supervisor: accept nothing more, and finish the requests under way
HURRY: Final = b"H"  # from the supervisor: end at once

LOOPBACK: Final = "127.0.0.1"
_LAST_PORT: Final = 65_535
_LIMITS_OF_EACH: Final = (
    "max_concurrency",
    "max_queue",
    "max_inflight_bytes",
    "max_key_concurrency",
    "max_connections",
    "max_connections_per_address",
)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker among the others."""

    number: int  # from 0
    port: int  # on which all workers listen
    common: Sequence[object]  # settings of features that are for all workers
    peer_socket: socket.socket  # UDP, bound to the port at which the others reach this worker
    peer_ports: tuple[int, ...]  # of the others, on loopback
    secret: str  # signs their datagrams
    supervised: Settings  # the settings that the supervisor read
    line: socket.socket  # to the supervisor; its end means that the supervisor has ended

    def settings(self, settings: Settings) -> Settings:
        """Return the settings of this worker's router.

        Limits that routers share hold for all workers together; the others hold for each worker.
        """
        return replace(
            settings,
            workers=1,
            port=self.port,
            admin_port=admin_port_of(settings, self.number),
        ).with_features(*self.common)


def received(line: socket.socket) -> bytes | None:
    """Return the bytes from the supervisor since the last call; None: it has ended."""
    try:
        return line.recv(64) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None


def admin_port_of(settings: Settings, number: int) -> int | None:
    """Return the admin port of a worker: one after the other; 0: the system chooses."""
    return settings.admin_port + number if settings.admin_port else settings.admin_port


def limits_of_each(settings: Settings) -> str:
    """Name the limits of each worker: all together may reach a multiple of them."""
    limits = {name: getattr(settings, name) for name in _LIMITS_OF_EACH}
    return ", ".join([f"{name} {limit}" for name, limit in limits.items() if limit is not None])


def check_workers(settings: Settings) -> None:
    """Raise ConfigError if settings rule out several workers."""
    count = settings.workers
    admin_port = settings.admin_port
    if count == 1:
        return
    if admin_port is None:
        raise ConfigError(
            f"workers is {count}, and admin_port is not set: each worker has its own metrics, and "
            f"needs a port to show "
            f"them; write admin_port, and the workers have that port and the {count - 1} behind it"
        )
    last = admin_port + count - 1
    if last > _LAST_PORT:
        raise ConfigError(
            f"admin_port is {admin_port}, and the last of {count} workers would have {last}: write "
            f"at most "
            f"{_LAST_PORT - count + 1}"
        )
