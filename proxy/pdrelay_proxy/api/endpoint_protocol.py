"""The edge of the endpoints: their requests go from the connection to requests/request.py, and
everything else to ASGI.

Behind another server FastAPI serves the same endpoints, by api/endpoint_asgi.py.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from pdrelay_proxy.api.asgi_exchange import CONTINUE, path_of
from pdrelay_proxy.api.clients import Clients
from pdrelay_proxy.api.guarded import GuardedProtocol
from pdrelay_proxy.core.http.framing import Head, RefusalReason
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_proxy.errors import ProxyError
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.request_set import RequestSet
from pdrelay_proxy.requests.response import LONG_BODY, HttpResponse

_URLS: Final[Mapping[bytes, str]] = {path.encode("ascii"): path for path in ENDPOINTS}


def endpoint_protocol(
    requests: RequestSet,
    clients: Clients,
    *,
    write_timeout_s: float | None,
    on_write_timeout: Callable[[], None],
) -> type[asyncio.Protocol]:
    """Return the protocol class for ``uvicorn.Config(http=...)``.

    ``write_timeout_s``: seconds in which a client must read something; ``on_write_timeout`` is
    called for each that has not.
    """
    given: dict[str, object] = {
        "requests": requests,
        "clients": clients,
        "write_timeout_s": write_timeout_s,
    }
    given["on_write_timeout"] = staticmethod(on_write_timeout)
    return type("EndpointProtocol", (_EndpointProtocol,), given)


class _EndpointProtocol(GuardedProtocol):
    """A connection whose requests for endpoints do not go to the application.

    It is the ClientConnection of those.
    """

    requests: RequestSet

    _request: Request | None = None  # that was read last, if it was for an endpoint
    # the rest of a long answer, which the client has yet to make room for
    _unwritten: memoryview | None = None
    _keeps = False  # whether the connection stays open behind it
    _busy = False  # a request for an endpoint is under way

    # What the client sends

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
        # the client sends its body if we say so
        waits = head.expects and not head.is_old and head.length != 0
        response = HttpResponse(
            self, self.transport.write, keep_alive and not waits, not head.is_old
        )
        request = self._request = self.exchange = Request(
            self.requests, response, path, head.headers, head.shown
        )
        self._busy = True
        if request.check() and waits:
            # a refusal closes: what comes behind it may be the body or a request
            request.keep_alive = keep_alive
            self.transport.write(CONTINUE)

    def take(self, piece: bytes, *, is_all: bool = False) -> None:
        """Take a piece of its body."""
        if self._request is not None:
            self._request.take(piece, is_all=is_all)
        else:
            super().take(piece)

    def serve(self, body: bytes = b"") -> None:
        """Have it served: it is complete. ``body``: all of it, if none was taken before."""
        request = self._request
        if request is None:
            super().serve(body)
            return
        if self.flow.write_paused:
            request.pause()  # the client has not read earlier answers
        request.begin(body)

    # The connection

    def pause_writing(self) -> None:
        """Have the engine wait: the client is slow."""
        super().pause_writing()
        if self._request is not None:
            self._request.pause()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._write_more()
        if self._request is not None:
            self._request.resume()

    def eof_received(self) -> None:
        """Leave the rest of a long answer to the transport, which is closed behind this and writes
        what it has.
        """
        rest = self._unwritten
        self._unwritten = None
        if rest is not None:
            self.transport.write(rest)  # it stays charged until the connection is lost

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered."""
        self._unwritten = None
        super().connection_lost(exc)
        self._request = None

    # What its request calls

    def write_long(self, head: bytes, body: bytes) -> None:
        """Write an answer in pieces: a transport would keep all of it for a client that reads
        nothing, uncounted.
        """
        self.transport.write(head)
        self._unwritten = memoryview(body)
        self._charge(len(body))
        self._write_more()

    def _write_more(self) -> None:
        """Write of a long answer what the client has made room for."""
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
                self.answered(keep_alive=self._keeps)

    def shutdown(self) -> None:
        """End the connection behind the answer that is being written."""
        if self._unwritten is None:
            super().shutdown()
        else:
            self._keeps = False

    def _refuse(self, fault: RefusalReason, error: ProxyError) -> None:
        """Close a connection on which half of an answer is written: another one would stand in its
        middle.
        """
        if self._unwritten is None:
            super()._refuse(fault, error)
            return
        self._stop()
        self.clients.on_refused(fault)
        self.transport.abort()

    def answered(self, *, keep_alive: bool) -> None:
        """Go on with what is behind the request, once all of its answer is written."""
        self._busy = False
        self._keeps = keep_alive
        if self._unwritten is None:
            super().answered(keep_alive=keep_alive)

    def is_idle(self) -> bool:
        """Tell whether no request is under way, and no answer is being written."""
        return not self._busy and self._unwritten is None and super().is_idle()


def _path_of(target: bytes) -> str | None:
    """Return the path of an endpoint that is written in another way: with a query, a host or
    escapes.
    """
    found = path_of(target)
    return found if found in ENDPOINTS else None
