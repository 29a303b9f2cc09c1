"""uvicorn's WebSocket protocol, for clients that mean harm. It needs ``websockets`` (the extra ``realtime``).

uvicorn's own reads on while nothing of its answers is read, keeps any number of fragments, waits without an end for
what it has written to be taken, and writes lines with the query of each session to the log.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from pdrelay_proxy.core.protocol.realtime import FED_MOST, POLICY, TOO_LARGE, TOO_MANY_EMPTY, EmptyFrames

if TYPE_CHECKING:
    from websockets.frames import Frame

    from pdrelay_proxy.api.clients import Clients

_FRAGMENTS_MOST: Final = 4096  # of one message; an empty one costs a client six bytes
_MESSAGES_MOST: Final = 4096  # that wait for the engine: one read may hold forty thousand empty ones
_LINGER_S: Final = 5.0  # seconds for a client to take what was written when its session is over
_QUIET: Final = logging.getLogger("pdrelay.websocket.client")
_QUIET.setLevel(logging.ERROR)
# What the connection is counted by: all clients, its address, and what is called if it reads nothing.
Counted: TypeAlias = "tuple[Clients, str | None, Callable[[], None]]"


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """One connection, which was an HTTP connection before (api/guarded.py)."""

    of: Counted  # set before it begins

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (uvicorn's signature)
        super().__init__(*args, **kwargs)
        self.logger = _QUIET
        self._empty = EmptyFrames()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back its place among the connections."""
        clients, network, on_write_timeout = self.of
        if isinstance(exc, TimeoutError):
            on_write_timeout()
        try:
            super().connection_lost(exc)
        finally:
            clients.leave_as(network)

    def pause_writing(self) -> None:
        """Read nothing, either: each ping that comes would be answered."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:  # noqa: ANN401 (uvicorn's events)
        """Return the next message; uvicorn reads on with it."""
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    def data_received(self, data: bytes) -> None:
        """Read what has come, in pieces: one read may hold forty thousand pings."""
        for begin in range(0, len(data), FED_MOST):
            if self.close_sent and begin:
                return  # what the client did before it has ended the session
            super().data_received(data[begin : begin + FED_MOST])

    def handle_ping(self) -> None:
        """Answer a ping."""
        if not self._ends_flood():
            super().handle_ping()

    def handle_pong(self, event: "Frame") -> None:
        """Take a pong."""
        if not self._ends_flood():
            super().handle_pong(event)

    def handle_text(self, event: "Frame") -> None:
        """Take a text, or the beginning of one."""
        if event.data or not self._ends_flood():
            super().handle_text(event)

    def handle_bytes(self, event: "Frame") -> None:
        """Take bytes, or the beginning of some."""
        if event.data or not self._ends_flood():
            super().handle_bytes(event)

    def _ends_flood(self) -> bool:
        """Count a frame that carries nothing; True: there are too many, and the session is over."""
        if not self._empty.is_flood(now=self.loop.time()):
            return False
        if not self.close_sent:
            self.conn.fail(POLICY, TOO_MANY_EMPTY)
            self.handle_parser_exception()
        return True

    def handle_cont(self, event: "Frame") -> None:
        """Take a fragment."""
        if not event.data and self._ends_flood():
            return
        if len(self.frames) < _FRAGMENTS_MOST:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(TOO_LARGE, f"a message may have {_FRAGMENTS_MOST} fragments")
            self.handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        """Queue a whole message; uvicorn stops to read behind the first one, but has all of one read by then."""
        if self.queue.qsize() < _MESSAGES_MOST:
            super().send_receive_event_to_app()
            return
        self.frames = []
        if not self.close_sent:
            self.conn.fail(TOO_LARGE, f"{_MESSAGES_MOST} messages may come at once")
            self.handle_parser_exception()

    def on_task_complete(self, task: "asyncio.Task[None]") -> None:
        """The session is over: close, also if the client takes nothing."""
        super().on_task_complete(task)
        if not self.disconnected:
            self.loop.call_later(_LINGER_S, self.transport.abort)
