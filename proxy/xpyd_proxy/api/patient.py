"""Clients that do not read: uvicorn waits for them for ever, and an engine and a place at the gate wait with it."""

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_INT: Final = struct.Struct("i")
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
_LOOKS: Final = 4  # in the time that a client may read nothing
logger = logging.getLogger(__name__)


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, and an end to its patience.

    Nothing is looked at as long as the kernel takes what is written. Once more than the transport's limit (64 KiB)
    waits in it, the engine is held up, so that what waits can only become less: by what the client reads.
    """

    patience_s: float | None = None  # seconds in which a client must read something; None: it has all the time
    on_stalled: Callable[[], None]  # called for each client that has not

    _stalled = 0  # looks in a row that found the same bytes
    _waiting = 0  # bytes, at the last look
    _look_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Begin to look whether the client reads."""
        super().pause_writing()
        self._stalled = self._waiting = 0
        self._look_later()

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._look_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        super().connection_lost(exc)
        self._look_no_more()

    def _look_later(self) -> None:
        if self.patience_s is not None:
            self._look_timer = self.loop.call_later(self.patience_s / _LOOKS, self._look)

    def _look_no_more(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None

    def _look(self) -> None:
        waiting, before = _unread(self.transport), self._waiting
        self._waiting = waiting
        self._stalled = 0 if waiting < before else self._stalled + 1
        if self._stalled <= _LOOKS:  # the first look has nothing to compare with
            self._look_later()
            return
        self._look_timer = None
        logger.warning(
            "a client (%s) has read nothing of its answer for %g s: its connection is closed",
            self.client[0] if self.client else "unknown",
            self.patience_s,
        )
        self.on_stalled()
        _reset(self.transport)


def _unread(transport: asyncio.Transport) -> int:
    """Return how many bytes the client has not taken: those in the transport, and in the kernel (tcp(7), SIOCOUTQ).

    The kernel takes more from the transport only when a third of its own buffer is free: megabytes.
    """
    sock = transport.get_extra_info("socket")
    try:
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _INT.pack(0))
    except (OSError, AttributeError):  # it has just been closed, or the system does not tell
        queued = _INT.pack(0)
    return transport.get_write_buffer_size() + int(_INT.unpack(queued)[0])


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection such that its end cannot be taken for that of the answer, and nothing of it waits on."""
    sock = transport.get_extra_info("socket")
    with suppress(OSError, AttributeError):  # it has just been closed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    transport.abort()
