"""The life of one request: pick two engines, let one prefill, stream the other's tokens."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from xpyd_proxy.core import dialect
from xpyd_proxy.core.journey import Journey, Visit
from xpyd_proxy.core.model import Answer, Call, Instance, Leg, Role
from xpyd_proxy.core.ports import Engines, Pairing, Stream
from xpyd_proxy.core.raw_json import encode
from xpyd_proxy.core.registry import Registry
from xpyd_proxy.core.routing import solo_reason
from xpyd_proxy.core.sse import WholeLines, error_status, first_data
from xpyd_proxy.core.verdict import check_prefill, refused_decode
from xpyd_proxy.errors import EngineError, Refused


@dataclass(frozen=True, slots=True)
class Reply:
    """A good answer: its whole body, or its beginning and the stream of the rest."""

    content_type: str
    body: bytes
    rest: AsyncGenerator[bytes] | None = None  # raises EngineError when the engine breaks off


@dataclass(frozen=True, slots=True)
class Relay:
    """Serves requests. It is handed everything it uses, and builds nothing."""

    registry: Registry
    engines: Engines
    pairing: Pairing
    clock: Callable[[], float]  # seconds; only differences count
    prefill_timeout_s: float

    @asynccontextmanager
    async def serve(self, call: Call, journey: Journey) -> AsyncGenerator[Reply]:
        """Enter with the engine's good answer in hand; leaving closes what is still open upstream.

        Raises:
            NoInstance: there is no engine to serve the request.
            Refused: an engine says that the client is at fault.
            EngineError: an engine failed before anything was shown to the client.
        """
        decode, body = await self._prepare(call, journey)
        journey.decode = Visit(decode.id)
        async with AsyncExitStack() as stack:
            with self._timed(journey.decode):
                stream = await stack.enter_async_context(self.engines.stream(_leg(decode, call, body, journey)))
                reply = await _begin(decode, stream)
            if reply.rest is not None:
                await stack.enter_async_context(aclosing(reply.rest))
            yield reply

    async def _prepare(self, call: Call, journey: Journey) -> tuple[Instance, bytes]:
        """Choose the decode engine and make its body, with the help of a prefill engine where that is right."""
        candidates = self.registry.usable(Role.DECODE)
        journey.solo = solo_reason(call.api, call.fields)
        if journey.solo is not None:
            return self.pairing.one(candidates), encode(call.fields)
        prefill, decode = self.pairing.pair(self.registry.usable(Role.PREFILL), candidates)
        journey.prefill = Visit(prefill.id)
        with self._timed(journey.prefill):
            leg = _leg(prefill, call, dialect.prefill_body(call.api, call.fields), journey)
            answer = await self.engines.ask(leg, timeout_s=self.prefill_timeout_s)
        check_prefill(prefill.id, answer)
        return decode, dialect.decode_body(call.fields, dialect.kv_params(prefill.id, answer.body))

    @contextmanager
    def _timed(self, visit: Visit) -> Generator[None]:
        start = self.clock()
        try:
            yield
        finally:
            visit.ms = (self.clock() - start) * 1000


def _leg(instance: Instance, call: Call, body: bytes, journey: Journey) -> Leg:
    """Both legs carry the same fresh id: engines match their halves of a request by it."""
    return Leg(instance, call.api, body, (*call.headers, (b"x-request-id", journey.request_id.encode())))


async def _begin(decode: Instance, stream: Stream) -> Reply:
    """Wait until it is certain that the answer is a good one, as far as that can be known."""
    if stream.status != 200:
        answer = Answer(stream.status, stream.content_type, await _whole(stream))
        raise refused_decode(decode.id, answer)
    if not stream.content_type.lower().startswith("text/event-stream"):
        return Reply(stream.content_type, await _whole(stream))
    lines = WholeLines()
    body = lines.feed(await _first_event(decode, stream.chunks))
    return Reply(stream.content_type, body, _rest(decode, lines, stream.chunks))


async def _whole(stream: Stream) -> bytes:
    return b"".join([chunk async for chunk in stream.chunks])


async def _first_event(decode: Instance, chunks: AsyncIterator[bytes]) -> bytes:
    """Read up to and including the first event, which tells a failed request from one that has begun."""
    received = b""
    async for chunk in chunks:
        received += chunk
        if (data := first_data(received)) is None:
            continue
        if (status := error_status(data)) is not None:
            raise Refused(status, "application/json", data)
        return received
    raise EngineError(f"{decode.id} ended its stream before the first event")


async def _rest(decode: Instance, lines: WholeLines, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Pass the rest on as it comes."""
    async for chunk in chunks:
        if passing := lines.feed(chunk):
            yield passing
    passing, complete = lines.finish()
    if not complete:
        raise EngineError(f"{decode.id} ended its stream without [DONE]")
    if passing:
        yield passing
