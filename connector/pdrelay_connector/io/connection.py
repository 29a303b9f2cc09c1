"""One TCP connection of the side channel, and its socket options."""

import socket
from dataclasses import dataclass

from pdrelay_connector.core.ids import ConnId
from pdrelay_connector.core.messages import Hello
from pdrelay_connector.core.session.handshake import ServerConnection
from pdrelay_connector.io.framing import Deframer
from pdrelay_connector.io.tls_records import TlsRecords

USER_TIMEOUT_MS = 20_000  # the kernel drops a peer that acknowledges no data for so long (RFC 5482)
# s, s, probes: the same for an idle connection
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


@dataclass(slots=True)
class Connection:
    """One connection. An accepted connection is unauthenticated until its valid Hello."""

    id: ConnId
    tls: TlsRecords
    inbox: Deframer
    # the client's Hello must prove it; absent once authenticated
    server_connection: ServerConnection | None = None
    address: str = ""  # IP address of the client of an accepted connection
    hello_by: float = float("inf")  # deadline for the Hello
    hello: Hello | None = None  # of an authenticated client
    closing: bool = False  # close once everything is sent


def set_socket_options(sock: socket.socket) -> None:
    """Make a socket non-blocking, and let the kernel detect a dead peer (keepalive)."""
    sock.settimeout(0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {"TCP_USER_TIMEOUT": USER_TIMEOUT_MS, **KEEPALIVE}.items():
        if hasattr(socket, option):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
