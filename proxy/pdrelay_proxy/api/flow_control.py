"""Flow control of a client's connection: when to read from it, and when to write to it."""

import asyncio
from typing import Final

HIGH_WATER: Final = 64 * 1024  # bytes that may wait for their reader


class FlowControl:
    """The flow control of one connection.

    There are two reasons not to read, and reading resumes when both are over.

    An application resumes reading with each part of the body that it takes. The bytes behind the
    request would then grow faster than they are read.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_writable: asyncio.Event | None = None  # while a task waits to write
        self.write_paused = False
        self.read_paused = False  # the application has enough unread bytes
        self.is_full = False  # enough bytes wait behind the present request

    def pause_reading(self) -> None:
        """Stop reading until the application has read the present bytes."""
        self.read_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Note that the application reads more."""
        if self.read_paused:
            self.read_paused = False
            self._resume_if_allowed()

    def fill(self) -> None:
        """Stop reading until ``empty``."""
        self.is_full = True
        self._transport.pause_reading()

    def empty(self) -> None:
        """Note that few bytes wait behind the request."""
        if self.is_full:
            self.is_full = False
            self._resume_if_allowed()

    def _resume_if_allowed(self) -> None:
        if not (self.read_paused or self.is_full):
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than is written."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Note that the client has read, or has gone."""
        self.write_paused = False
        if self._is_writable is not None:
            self._is_writable.set()
            self._is_writable = None

    async def drain(self) -> None:
        """Wait until more may be written."""
        if self.write_paused:
            if self._is_writable is None:
                self._is_writable = asyncio.Event()
            await self._is_writable.wait()
