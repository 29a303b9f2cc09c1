"""The connections of clients whose requests for endpoints go to requests/request.py; everything
else goes to ASGI.

Behind another server FastAPI serves the same endpoints, by api/endpoint_asgi.py.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from pdrelay_proxy.api.asgi_exchange import CONTINUE, path_of
from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.guarded import GuardedProtocol
from pdrelay_proxy.api.unread_answers import UnreadAnswers
from pdrelay_proxy.core.http.framing import Head, RefusalReason
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.request_set import RequestSet
from pdrelay_proxy.requests.response import LONG_BODY, HttpResponse

_URLS: Final[Mapping[bytes, str]] = {path.encode("ascii"): path for path in ENDPOINTS}


def endpoint_protocol(
    requests: RequestSet, clients: Clients, unread_answers: UnreadAnswers
) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``."""
    attributes: dict[str, object] = {
        "requests": requests,
        "clients": clients,
        "unread_answers": unread_answers,
    }
    return type("EndpointProtocol", (_EndpointProtocol,), attributes)


class _EndpointProtocol(GuardedProtocol):
    """A connection whose requests for endpoints bypass the application.

    It is their ClientConnection.
    """

    requests: RequestSet

    _request: Request | None = None  # the latest request, if it is for an endpoint
    # the rest of a long answer, until the client has read enough
    _unwritten: memoryview | None = None
    _keeps_open = False  # the connection stays open behind it
    _busy = False  # a request for an endpoint is under way

    # Called with the client's data

    def begin(self, head: Head) -> None:
        """Begin a request."""
        path = _URLS.get(head.target)
        if path is None and head.method == b"POST":
            path = _path_of(head.target)
        if path is None or head.method != b"POST":
            self._request = None
            super().begin(head)
            return
        keep_alive = head.keep_alive and not head.is_old
        # the client sends its body after 100 Continue
        waits = head.expects and not head.is_old and head.length != 0
        response = HttpResponse(
            self, self.transport.write, keep_alive and not waits, not head.is_old
        )
        request = self._request = self.exchange = Request(
            self.requests, response, path, head.headers, head.shown
        )
        self._busy = True
        if request.check() and waits:
            # a refusal closes the connection: the next bytes may be the body or a request
            request.keep_alive = keep_alive
            self.transport.write(CONTINUE)

    def receive_body(self, piece: bytes, *, is_all: bool = False) -> None:
        """Add a piece of the request's body."""
        if self._request is not None:
            self._request.take(piece, is_all=is_all)
        else:
            super().receive_body(piece)

    def serve(self, body: bytes = b"") -> None:
        """Serve the complete request. ``body``: all of it, if no piece came before."""
        request = self._request
        if request is None:
            super().serve(body)
            return
        if self.flow.write_paused:
            request.pause()  # the client has not read earlier answers
        request.begin(body)

    # The connection

    def pause_writing(self) -> None:
        """Pause the engine: the client is slow."""
        super().pause_writing()
        if self._request is not None:
            self._request.pause()

    def resume_writing(self) -> None:
        """Resume writing."""
        super().resume_writing()
        self._write_more()
        if self._request is not None:
            self._request.resume()

    def eof_received(self) -> None:
        """Give the rest of a long answer to the transport, which is closed after this and writes
        its buffer.
        """
        rest = self._unwritten
        self._unwritten = None
        if rest is not None:
            self.transport.write(rest)  # its bytes stay charged until the connection is lost

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the request; the connection's end stops it."""
        self._unwritten = None
        super().connection_lost(exc)
        self._request = None

    # Called by its request

    def write_long(self, head: bytes, body: bytes) -> None:
        """Write an answer in pieces: a transport would buffer all of it, uncounted, for a client
        that does not read.
        """
        self.transport.write(head)
        self._unwritten = memoryview(body)
        self._charge(len(body))
        self._write_more()

    def _write_more(self) -> None:
        """Write as much of a long answer as the transport takes."""
        rest = self._unwritten
        while rest and not (self.flow.write_paused or self.transport.is_closing()):
            piece = rest[:LONG_BODY]
            rest = rest[LONG_BODY:]
            self._unwritten = rest
            self.transport.write(bytes(piece))
            self.free(len(piece))
        if rest is not None and not rest:
            self._unwritten = None
            if not self._busy:
                self.answered(keep_alive=self._keeps_open)

    def shutdown(self) -> None:
        """End the connection behind the present answer."""
        if self._unwritten is None:
            super().shutdown()
        else:
            self._keeps_open = False

    def _refuse(self, fault: RefusalReason, error: ProxyError) -> None:
        """Abort a connection with half an answer, which leaves no place for an error."""
        if self._unwritten is None:
            super()._refuse(fault, error)
            return
        self._stop()
        self.clients.on_refused(fault)
        self.transport.abort()

    def answered(self, *, keep_alive: bool) -> None:
        """Continue with the bytes behind the request, once its whole answer is written."""
        self._busy = False
        self._keeps_open = keep_alive
        if self._unwritten is None:
            super().answered(keep_alive=keep_alive)

    def is_idle(self) -> bool:
        """Return whether no request is under way, and no answer is being written."""
        return not self._busy and self._unwritten is None and super().is_idle()


def _path_of(target: bytes) -> str | None:
    """Return the path of an endpoint in another spelling: with a query, a host or escapes."""
    path = path_of(target)
    return path if path in ENDPOINTS else None
