"""The endpoints as an ASGI application: for requests that come through uvicorn's ASGI, other
servers, and tests without a socket.

The request is the same object (requests/request.py); only its bytes come and go in ASGI's messages.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from pdrelay_proxy.core.admission.lifetime import Stage, cut_short
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.request_set import RequestSet
from pdrelay_proxy.requests.response import LONG_BODY

_HIGH: Final = 64 * 1024  # unsent bytes above which the engine has to wait


class Endpoints:
    """Serves the POST endpoints."""

    def __init__(self, requests: RequestSet) -> None:
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        response = _AsgiResponse(self._requests.services.gate.admission.charge)
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        request = Request(self._requests, response, scope["path"], headers)
        response.hold_up_when_full(request)
        # for a refusal: the body may never come
        response.keep_alive = b"expect" not in dict(headers)
        try:
            if request.check():
                response.keep_alive = True
                await _read(request, receive)
            request.serve()
            await self._answer(request, response, receive, send)
        finally:
            request.leave()
            response.free()

    async def _answer(
        self, request: Request, response: "_AsgiResponse", receive: Receive, send: Send
    ) -> None:
        """Send the answer as it comes, and notice a client's disconnect."""
        watching = asyncio.create_task(_watch(request, receive))
        try:
            await response.send_to(send)
        except asyncio.CancelledError:
            if self._requests.services.lifetime.stage is not Stage.CLOSED:
                raise
            # The server cancels requests that took too long to finish, and ignores what they raise.
            request.interrupt(cut_short())
            await response.send_to(send)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _read(request: Request, receive: Receive) -> None:
    """Pass the body to the request until it is complete, refused, or the client has gone."""
    while not request.response_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            request.leave()
            return
        request.receive_body(message.get("body", b""))
        if not message.get("more_body", False):
            return


async def _watch(request: Request, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.leave()


class _AsgiResponse:
    """Implements ResponseWriter: queues messages until they are sent."""

    def __init__(self, charge: Callable[[int], None]) -> None:
        self._charge = charge  # charges unsent bytes, or gives them back
        self._request: Request | None = None
        self.begun = False
        self.keep_alive = True
        self.relay = None  # the server frames the body itself
        self._streams = False
        self._is_over = False
        self._messages: deque[Message] = deque()
        self._size = 0  # bytes of body in them
        self._news = asyncio.Event()

    def hold_up_when_full(self, request: Request) -> None:
        """Have the request pause while the queue is full; it is built with this writer."""
        self._request = request

    def begin(
        self, status: int, lines: bytes, body: bytes, *, streams: bool, last: bool = False
    ) -> None:
        """Queue the head and the whole body, or the first piece of a stream."""
        del last
        self.begun = True
        self._streams = streams
        headers = [
            (name, value)
            for name, _, value in [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]
        ]
        if not streams:
            headers.append((b"content-length", b"%d" % len(body)))
        if not self.keep_alive:
            headers.append((b"connection", b"close"))
        self._messages.append({"type": "http.response.start", "status": status, "headers": headers})
        self._add(body, more=streams)

    def write(self, piece: bytes, /) -> None:
        """Queue a piece of a stream."""
        self._add(piece, more=True)
        if self._size > _HIGH and self._request is not None:
            self._request.pause()

    def end(self, piece: bytes = b"", /) -> None:
        """Queue the end of a stream."""
        if self._streams:
            self._add(piece, more=False)

    def close(self) -> None:
        """Send only what is queued."""
        self._is_over = True
        self._request = None
        self._news.set()

    def free(self) -> None:
        """Drop unsent messages."""
        self._messages.clear()
        self._charge(-self._size)
        self._size = 0

    def _add(self, body: bytes, *, more: bool) -> None:
        self._size += len(body)
        self._charge(len(body))
        for offset in range(0, len(body), LONG_BODY) or (0,):
            piece = body[offset : offset + LONG_BODY]
            is_more = more or offset + LONG_BODY < len(body)
            self._messages.append(
                {"type": "http.response.body", "body": piece, "more_body": is_more}
            )
        self._news.set()

    async def send_to(self, send: Send) -> None:
        """Send messages as they come, to the end of the answer."""
        while self._messages or not self._is_over:
            while self._messages:
                message = self._messages[0]
                await send(message)  # it may be cancelled before the message is written
                self._messages.popleft()
                size = len(message.get("body", b""))
                self._size -= size
                self._charge(-size)
            if self._request is not None:
                self._request.resume()
            if not self._is_over:
                self._news.clear()
                await self._news.wait()
