"""What the kernel knows of the bytes that were written to a socket (Linux: tcp(7), TCP_INFO)."""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Final, NamedTuple

# of struct tcp_info (linux/tcp.h): tcpi_unacked, tcpi_bytes_acked, tcpi_notsent_bytes
_COUNTS: Final = struct.Struct("=24xI92xQ16xI")
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: close() resets the connection


class Delivery(NamedTuple):
    """How far the bytes of a connection have come."""

    acknowledged: int  # bytes that the other end's kernel has taken, of the whole connection
    is_all: bool  # nothing else was given to this end's kernel


def delivery(sock: socket.socket | None) -> Delivery | None:
    """Return how far the written bytes have come; None: unknown, or the socket is closed."""
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return None
    with suppress(OSError, ValueError, struct.error):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
        unacknowledged, acknowledged, unsent = _COUNTS.unpack(info)
        return Delivery(acknowledged, not (unacknowledged or unsent))
    return None


def has_unread(transport: asyncio.Transport) -> bool:
    """Return whether the other end seems to have unread bytes that would be lost if this process
    ended.

    Under TLS the transport hides its encrypted bytes; some wait there for as long as the kernel has
    unacknowledged bytes.
    """
    if transport.get_write_buffer_size() or transport.get_extra_info("sslcontext") is None:
        return transport.get_write_buffer_size() > 0
    delivered = delivery(transport.get_extra_info("socket"))
    return delivered is not None and not delivered.is_all


def bytes_taken(transport: asyncio.Transport) -> int | None:
    """Return how many bytes the other end has taken; None: all, or that is not known."""
    delivered = delivery(transport.get_extra_info("socket"))
    if delivered is None or (delivered.is_all and not transport.get_write_buffer_size()):
        return None
    return delivered.acknowledged


def reset_at_close(sock: socket.socket | None) -> None:
    """Have close() drop unread bytes and reset the connection: an answer without a length would end
    like a whole one.
    """
    if sock is not None:
        with suppress(OSError, ValueError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
