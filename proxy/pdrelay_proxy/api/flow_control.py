"""When a connection is read from, and when it may be written to."""

import asyncio
from typing import Final

HIGH_WATER: Final = 64 * 1024  # bytes that may wait for who reads them


class FlowControl:
    """One for each connection.

    There are two reasons not to read, and both must be over before it goes on.

    An application that takes a body resumes reading with each part of it. What came behind that
    would then grow faster than it is read.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_writable: asyncio.Event | None = None  # while somebody waits to write
        self.write_paused = False
        self.read_paused = False  # enough waits for the application
        self.is_full = False  # enough waits behind the request that is answered

    def pause_reading(self) -> None:
        """Read no more before the application takes what is here."""
        self.read_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Note that the application takes more."""
        if self.read_paused:
            self.read_paused = False
            self._go_on()

    def fill(self) -> None:
        """Read no more before ``empty``."""
        self.is_full = True
        self._transport.pause_reading()

    def empty(self) -> None:
        """Note that little waits behind the request."""
        if self.is_full:
            self.is_full = False
            self._go_on()

    def _go_on(self) -> None:
        if not (self.read_paused or self.is_full):
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Note that the client does not read as fast as it is written to."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Note that it has read, or has gone."""
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
