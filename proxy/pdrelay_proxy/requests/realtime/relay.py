"""One session: messages go both ways, each side as fast as the other one reads, until a side or a limit ends it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from pdrelay_proxy.core.protocol.realtime import SessionEnd, SocketClosed, ended_by, idle, overdue

_CLOSE_S: Final = 5.0  # seconds for both sides to take the end
_LOOK_LEAST_S: Final = 0.01


class Socket(Protocol):
    """One end of a session."""

    async def receive(self) -> str | bytes:
        """Return the next message; raises SocketClosed."""
        ...

    async def send(self, message: str | bytes, /) -> None:
        """Send a message, and wait while the other side does not read; raises SocketClosed."""
        ...

    async def close(self, code: int, reason: str, /) -> None:
        """Say why, and close; nothing happens if it is closed."""
        ...

    def abort(self) -> None:
        """Close without a word."""
        ...


class Relay:
    """Passes messages between a client and an engine. At most one message of each side is held here."""

    def __init__(
        self, client: Socket, engine: Socket, *, idle_s: float, total_s: float, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._engine = engine
        self._idle_s = idle_s  # seconds without a message that came through
        self._total_s = total_s
        self._clock = clock
        self._began = self._heard = clock()

    async def run(self) -> SessionEnd:
        """Pass messages on until the session ends; both sides have been told why then."""
        pumps = asyncio.ensure_future(self._up()), asyncio.ensure_future(self._down())
        try:
            end = await self._first_end(pumps)
        except BaseException:  # the server cuts the session off
            self._client.abort()
            self._engine.abort()
            raise
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
        await self._close(end)
        return end

    async def _first_end(self, pumps: "tuple[asyncio.Future[SessionEnd], asyncio.Future[SessionEnd]]") -> SessionEnd:
        while True:
            now = self._clock()
            if now - self._began >= self._total_s:
                return overdue(self._total_s)
            if now - self._heard >= self._idle_s:
                return idle(self._idle_s)
            left = min(self._began + self._total_s, self._heard + self._idle_s) - now
            done, _ = await asyncio.wait(pumps, timeout=max(left, _LOOK_LEAST_S), return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                if pump in done:
                    return pump.result()

    async def _up(self) -> SessionEnd:
        try:
            while True:
                await self._engine.send(await self._client.receive())
                self._heard = self._clock()
        except SocketClosed as closed:
            return ended_by(closed)

    async def _down(self) -> SessionEnd:
        try:
            while True:
                await self._client.send(await self._engine.receive())
                self._heard = self._clock()
        except SocketClosed as closed:
            return ended_by(closed)

    async def _close(self, end: SessionEnd) -> None:
        """Tell both sides; one that does not take it is cut off, at once if the server has no more time."""
        sides = self._engine, self._client
        closings = {asyncio.ensure_future(side.close(end.code, end.reason)): side for side in sides}
        with suppress(asyncio.CancelledError):  # the session is over, and nothing else is waited for
            await asyncio.wait(closings, timeout=_CLOSE_S)
        late = [closing for closing in closings if not closing.done()]
        for closing, side in closings.items():
            if closing in late:
                closing.cancel()
                side.abort()
            elif closing.exception() is not None:
                side.abort()
        if late:
            await asyncio.wait(late)
