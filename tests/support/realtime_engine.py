"""A pretended engine with ``/v1/realtime``: it greets as vLLM does, and then says back what it hears."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

HELLO = {"type": "session.created", "id": "sess-1", "created": 1}


async def echo(session: ServerConnection) -> None:
    """Say everything back, to the end."""
    async for message in session:
        await session.send(message)


class RealtimeEngine:
    """Serves sessions by ``behave``; tests look at what it has seen."""

    def __init__(self, *, status: int | None = None) -> None:
        self.behave: Callable[[ServerConnection], Awaitable[None]] = echo
        self.status = status  # of its answer to an offer; None: it takes it
        self.heads: list[dict[str, str]] = []  # of offers
        self.paths: list[str] = []
        self.closed: list[tuple[int, str]] = []  # of sessions that are over
        self.open: set[ServerConnection] = set()
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _offered(self, session, request):
        if request.path == "/v1/models":  # the router asks when it likes; nothing of a client is in it
            return session.respond(404, "no\n")
        self.heads.append({name.lower(): value for name, value in request.headers.raw_items()})
        self.paths.append(request.path)
        return None if self.status is None else session.respond(self.status, "no\n")

    async def _serve(self, session: ServerConnection) -> None:
        self.open.add(session)
        try:
            with suppress(ConnectionClosed):
                await session.send(json.dumps(HELLO))
                await self.behave(session)
        finally:
            self.open.discard(session)
            with suppress(asyncio.CancelledError):
                await session.wait_closed()
            self.closed.append((session.close_code or 0, session.close_reason or ""))

    def drop(self) -> None:
        """Break off all sessions."""
        for session in tuple(self.open):
            session.transport.abort()

    @asynccontextmanager
    async def running(self, **options: object) -> AsyncGenerator["RealtimeEngine"]:
        """Listen on loopback."""
        options = {"max_size": None, "close_timeout": 1, "ping_interval": None, **options}
        async with serve(self._serve, "127.0.0.1", 0, process_request=self._offered, **options) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self
            self.drop()
