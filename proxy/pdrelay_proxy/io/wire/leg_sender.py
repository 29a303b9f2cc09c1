"""Sends requests to engines; a ResponseHandler gets each response, without a task that waits for
it.
"""

import asyncio
from typing import Final

from pdrelay_proxy.core.admission.keys import Outbound
from pdrelay_proxy.core.model import Headers, Instance, LegRequest, RequestId
from pdrelay_proxy.core.raw_json import Pieces
from pdrelay_proxy.errors import EngineError, forget_frames
from pdrelay_proxy.io.wire.connection import Connection, Peer
from pdrelay_proxy.io.wire.pool import Pool
from pdrelay_proxy.io.wire.request_head import Unsendable
from pdrelay_proxy.io.wire.response_handler import ResponseHandler

_JSON: Final = b"application/json"


class LegSender:
    """Sends over a pool's connections; a ResponseHandler gets each response.

    All calls return at once. ``done`` gives the connection of a complete answer back. A request
    that HTTP cannot carry raises EngineError.
    """

    __slots__ = ("_outbound", "_pool")

    def __init__(self, pool: Pool, outbound: Outbound) -> None:
        self._pool = pool
        self._outbound = outbound

    def send(
        self,
        call: ResponseHandler,
        instance: Instance,
        path: str,
        *,
        headers: Headers,
        request: RequestId,
        body: Pieces,
        content_type: bytes = _JSON,
    ) -> None:
        """Post the pieces of a body; ``request`` is the router's own id: it needs no check."""
        peer = self._pool.peer(instance)
        heads = peer.heads
        if headers or self._outbound.has_keys:
            headers = self._outbound.headers(instance.pool, headers)
        length = len(body[0]) if len(body) == 1 else sum([len(piece) for piece in body])
        try:
            if content_type == _JSON:
                head = heads.post_ours(path, headers, request, length)
            else:
                all_headers = (
                    *headers,
                    (b"x-request-id", request.encode()),
                    (b"content-type", content_type),
                )
                head = heads.post(path, all_headers, length)
        except Unsendable as exc:
            raise _unsendable(instance, exc) from exc
        self._start(call, instance, peer, head, body)

    def post(self, call: ResponseHandler, leg: LegRequest) -> None:
        """Post a leg whose headers have its id."""
        headers = (
            *self._outbound.headers(leg.instance.pool, leg.headers),
            (b"content-type", leg.content_type),
        )
        try:
            head = self._pool.peer(leg.instance).heads.post(leg.path, headers, len(leg.body))
        except Unsendable as exc:
            raise _unsendable(leg.instance, exc) from exc
        self._start(call, leg.instance, self._pool.peer(leg.instance), head, [leg.body])

    def get(
        self,
        call: ResponseHandler,
        instance: Instance,
        path: str,
        headers: Headers,
        *,
        bare: bool = False,
    ) -> None:
        """Get a path; ``bare``: without a key."""
        sent_headers = (
            self._outbound.bare(headers) if bare else self._outbound.headers(instance.pool, headers)
        )
        try:
            head = self._pool.peer(instance).heads.get(path, sent_headers)
        except Unsendable as exc:
            raise _unsendable(instance, exc) from exc
        self._start(call, instance, self._pool.peer(instance), head, [b""])

    def _start(
        self, call: ResponseHandler, instance: Instance, peer: Peer, head: bytes, body: Pieces
    ) -> None:
        while (connection := self._pool.waiting_at(peer)) is not None:
            if connection.start(call, head, body):
                return
            connection.abort()
        call.opening = asyncio.get_running_loop().create_task(
            self._open(call, instance, head, body)
        )

    async def _open(
        self, call: ResponseHandler, instance: Instance, head: bytes, body: Pieces
    ) -> None:
        """Open a connection for a request."""
        try:
            await self._open_and_start(call, instance, head, body)
        except Exception as bug:  # noqa: BLE001 (whatever it is, the handler must get it)
            if call.error is None and not call.complete:
                call.crashed(bug)
        finally:
            call.opening = None  # the task's exception refers to the call: a reference cycle

    async def _open_and_start(
        self, call: ResponseHandler, instance: Instance, head: bytes, body: Pieces
    ) -> None:
        try:
            connection = await self._pool.open(instance)
        except EngineError as error:
            forget_frames(error)
            call.failed(error)
            return
        if call.error is not None:  # the request was given up meanwhile
            self._pool.put_back(connection)
        elif not connection.start(call, head, body):
            connection.abort()
            call.failed(
                EngineError(
                    f"{call.engine} closed the connection before the request was sent",
                    reached=False,
                )
            )

    def done(self, call: ResponseHandler) -> None:
        """Give back the connection of a complete answer; close any other."""
        source = call.source
        call.source = None
        if isinstance(source, Connection):
            self._pool.put_back(source)


def _unsendable(instance: Instance, exc: Unsendable) -> EngineError:
    """Return the EngineError for a request that HTTP cannot carry."""
    return EngineError(f"{instance.id} was not asked: {exc}", reached=False)
