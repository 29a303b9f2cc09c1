"""vLLM over HTTP, by the router's own client."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from xpyd_proxy.core.keys import Outbound
from xpyd_proxy.core.model import Answer, Headers, Instance, Leg
from xpyd_proxy.core.ports import nothing
from xpyd_proxy.core.whole import ANSWER_MOST
from xpyd_proxy.io.guard import Guard
from xpyd_proxy.io.wire.connection import Connection
from xpyd_proxy.io.wire.heads import Heads, Unsendable
from xpyd_proxy.io.wire.pool import Pool
from xpyd_proxy.io.wire.reply import Reply
from xpyd_proxy.io.wire.teller import Teller, unsendable
from xpyd_proxy.settings import Settings


class Chunks(AsyncIterator[bytes]):
    """The body of an answer: iterate over it, or have it delivered; not both at once.

    Iterating costs a wake-up for what has come since the last one, and nothing for what has come already. Having it
    delivered costs one wake-up for all of the body.
    """

    __slots__ = ("_reply",)

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    async def __anext__(self) -> bytes:
        """Return what has come, joined; raises EngineError when the engine breaks off."""
        if piece := await self._reply.more():
            return piece
        raise StopAsyncIteration

    async def deliver(self, sink: Callable[[bytes], object]) -> None:
        """Call ``sink`` with each piece as soon as it is read from the socket; return when that was all.

        It is called inside the event loop's read, so it should only pass the bytes on (``transport.write``); what it
        raises ends the stream, and comes out here. When its own way out is full it calls ``pause``, and ``resume``
        later. Cancelling this ends the delivery, and what comes after that waits to be read.

        Raises:
            EngineError: the engine broke off; all that came before has been delivered.
        """
        await self._reply.deliver(sink)

    def pause(self) -> None:
        """Let the engine wait: nothing is delivered until ``resume``."""
        self._reply.hold()

    def resume(self) -> None:
        """Go on."""
        self._reply.go_on()


class WireStream:
    """An answer that is arriving; the block that opened it closes it."""

    __slots__ = ("chunks", "content_type", "status")

    def __init__(self, reply: Reply) -> None:
        self.status = reply.status
        self.content_type = reply.content_type.decode("latin-1")
        self.chunks = Chunks(reply)


class _Streaming:
    """The block in which a request is open."""

    __slots__ = ("_connection", "_leg", "_outbound", "_pool", "_sent")

    _connection: Connection  # since it was entered

    def __init__(self, pool: Pool, outbound: Outbound, leg: Leg, sent: Callable[[], None]) -> None:
        self._pool = pool
        self._outbound = outbound
        self._leg = leg
        self._sent = sent

    async def __aenter__(self) -> WireStream:
        leg = self._leg
        head = _post(self._pool.heads(leg.instance.address), self._outbound, leg)
        self._connection = self._pool.waiting(leg.instance.address) or await self._pool.open(leg.instance)
        reply = Reply(leg.instance.id, self._connection)
        try:
            if await self._connection.send(reply, head, leg.body):
                self._sent()
            await reply.head()
        except BaseException:
            self._connection.abort()
            raise
        return WireStream(reply)

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._pool.put_back(self._connection)


class WireEngines:
    """Keeps connections to every engine; use it as a context manager.

    It speaks HTTP/1.1 alone, follows no redirect, keeps no cookie, and asks for no compression. A request is written to
    one connection once: nothing is sent again behind the back of who asked.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        outbound: Outbound | None = None,
        tls: ssl.SSLContext | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._outbound = outbound or Outbound()
        self._probe_timeout_s = settings.probe_timeout_s
        self._pool = Pool(
            keepalive_s=settings.engine_keepalive_s, connect_timeout_s=settings.connect_timeout_s, tls=tls, guard=guard
        )
        self._teller = Teller(self._pool, self._outbound)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    @property
    def pool(self) -> Pool:
        """The connections, for those who look after them."""
        return self._pool

    @property
    def teller(self) -> Teller:
        """Asks by the same connections, and has answers told."""
        return self._teller

    def give_up(self, instance: Instance, *, silent_s: float) -> int:
        """End the requests to an engine that hangs: those that heard nothing from it for so long; return how many."""
        return self._pool.give_up(instance, silent_s=silent_s)

    async def ask(self, leg: Leg, *, timeout_s: float) -> Answer:
        """Post, and wait at most so many seconds for the whole answer; giving up closes the connection.

        Raises:
            EngineTimeout: the answer did not come in time.
            EngineError: the engine cannot be reached, broke off, or answered with more than 64 MiB.
        """
        head = _post(self._pool.heads(leg.instance.address), self._outbound, leg)
        return await self._whole(leg.instance, head, leg.body, timeout_s)

    def stream(self, leg: Leg, *, sent: Callable[[], None] = nothing) -> AbstractAsyncContextManager[WireStream]:
        """Post, and wait for the head; leaving the block closes the request, read or not.

        ``sent`` is called when the last byte of the request is on its way. The stream's ``chunks`` can also be
        delivered (see Chunks).

        Raises:
            EngineTimeout: no connection in time.
            EngineError: the engine cannot be reached, or broke off.
        """
        return _Streaming(self._pool, self._outbound, leg, sent)

    async def models(self, instance: Instance, headers: Headers, *, bare: bool = False) -> Answer:
        """Get the engine's list of models, ``bare``: without showing a key; raises what ``ask`` raises."""
        heads, outbound = self._pool.heads(instance.address), self._outbound
        try:
            shown = outbound.bare(headers) if bare else outbound.headers(instance.role, headers)
            head = heads.get("/v1/models", shown)
        except Unsendable as exc:
            raise unsendable(instance, exc) from exc
        return await self._whole(instance, head, b"", self._probe_timeout_s)

    async def _whole(self, instance: Instance, head: bytes, body: bytes, timeout_s: float) -> Answer:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        connection = self._pool.waiting(instance.address) or await self._pool.open(instance, timeout_s=timeout_s)
        reply = Reply(instance.id, connection, most=ANSWER_MOST)
        timer = loop.call_at(ends_at, reply.out_of_time, timeout_s)
        try:
            await connection.send(reply, head, body)
            content = await reply.whole()
        finally:
            timer.cancel()
            self._pool.put_back(connection)  # which closes it, unless all has come
        return Answer(reply.status, reply.content_type.decode("latin-1"), content, reply.load)


def _post(heads: Heads, outbound: Outbound, leg: Leg) -> bytes:
    headers = (*outbound.headers(leg.instance.role, leg.headers), (b"content-type", leg.content_type))
    try:
        return heads.post(leg.path, headers, len(leg.body))
    except Unsendable as exc:
        raise unsendable(leg.instance, exc) from exc
