"""Requests to engines whose answers are told: nobody waits for them."""

import asyncio
from typing import Final

from xpyd_proxy.core.keys import Outbound
from xpyd_proxy.core.model import Headers, Instance, RequestId
from xpyd_proxy.core.raw_json import Pieces
from xpyd_proxy.errors import EngineError
from xpyd_proxy.io.wire.call import Call
from xpyd_proxy.io.wire.connection import Connection
from xpyd_proxy.io.wire.heads import Unsendable
from xpyd_proxy.io.wire.pool import Pool

_JSON: Final = b"application/json"


class Teller:
    """Asks by a pool's connections, and has a Call told of each answer."""

    __slots__ = ("_outbound", "_pool")

    def __init__(self, pool: Pool, outbound: Outbound) -> None:
        self._pool = pool
        self._outbound = outbound

    def tell(
        self,
        call: Call,
        instance: Instance,
        path: str,
        *,
        headers: Headers,
        request: RequestId,
        body: Pieces,
        content_type: bytes = _JSON,
    ) -> None:
        """Post the pieces of a body, and tell ``call`` of the answer; returns at once.

        ``done`` gives the connection back. ``request`` is an id of ours, which nobody need look at.

        Raises:
            EngineError: the request is not one that HTTP can carry.
        """
        peer = self._pool.peer(instance)
        headers = self._outbound.headers(instance.role, headers)
        try:
            length = sum([len(piece) for piece in body])
            if content_type == _JSON:
                head = peer.heads.post_ours(path, headers, request, length)
            else:
                named = (*headers, (b"x-request-id", request.encode()), (b"content-type", content_type))
                head = peer.heads.post(path, named, length)
        except Unsendable as exc:
            raise unsendable(instance, exc) from exc
        while (connection := self._pool.waiting_at(peer)) is not None:
            if connection.start(call, head, body):
                return
            connection.abort()
        call.opening = asyncio.get_running_loop().create_task(self._open(call, instance, head, body))

    async def _open(self, call: Call, instance: Instance, head: bytes, body: Pieces) -> None:
        """Open a connection for a request."""
        try:
            connection = await self._pool.open(instance)
        except EngineError as error:
            call.failed(error.with_traceback(None))  # it leads here, and to the call: a circle
            return
        if call.error is not None:  # nobody wants it any more
            self._pool.put_back(connection)
        elif not connection.start(call, head, body):
            connection.abort()
            call.failed(EngineError(f"{call.engine} closed the connection before the request was sent", reached=False))

    def done(self, call: Call) -> None:
        """Give back the connection of an answer that is complete; any other one is closed."""
        source, call.source = call.source, None
        if isinstance(source, Connection):
            self._pool.put_back(source)


def unsendable(instance: Instance, exc: Unsendable) -> EngineError:
    """Say that a request cannot be carried by HTTP."""
    return EngineError(f"{instance.id} was not asked: {exc}", reached=False)
