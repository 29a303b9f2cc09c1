"""The decode engine's answer: when it is certain to be a good one."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import msgspec

from xpyd_proxy.core.model import Answer, Instance
from xpyd_proxy.core.passing import check_type, clean_answer, is_stream
from xpyd_proxy.core.ports import Stream
from xpyd_proxy.core.sse import Beginning, error_status
from xpyd_proxy.core.verdict import JSON, refusal, refused_decode
from xpyd_proxy.core.whole import ANSWER_MOST, whole
from xpyd_proxy.errors import EngineError
from xpyd_proxy.relay.streaming import Pouring

BEGINNING_MOST: Final = 1024 * 1024  # bytes of a stream up to the end of its first event


class Reply(msgspec.Struct, frozen=True):
    """A good answer: its whole body, or its beginning and the stream of the rest."""

    content_type: str
    body: bytes
    rest: AsyncGenerator[bytes] | None = None  # raises EngineError when the engine breaks off, OutOfTime when time does
    pouring: Pouring | None = None  # another way to get the rest, where there is one; only one of them may be used


async def begin(decode: Instance, stream: Stream) -> tuple[bytes, bool]:
    """Wait until it is certain that the answer is a good one, as far as that can be known.

    Returns what has come of it, and whether there is more to come.

    Raises:
        Refused: the engine says that the client is at fault, or that it cannot serve the request.
        EngineError: the engine failed before anything was shown to the client, or its answer may not be shown.
    """
    if stream.status != 200:
        answer = Answer(stream.status, stream.content_type, await _whole(decode, stream))
        raise refused_decode(decode.id, answer)
    content_type = stream.content_type.encode("latin-1")
    check_type(decode.id, content_type)
    if not is_stream(content_type):
        return clean_answer(decode.id, content_type, await _whole(decode, stream)), False
    return await _first_event(decode, stream.chunks), True


async def _whole(decode: Instance, stream: Stream) -> bytes:
    too_long = EngineError(f"{decode.id} answered with more than {ANSWER_MOST} bytes")
    return await whole(stream.chunks, ANSWER_MOST, too_long)


async def _first_event(decode: Instance, chunks: AsyncIterator[bytes]) -> bytes:
    """Read up to and including the first event, which tells a failed request from one that has begun."""
    beginning = Beginning()
    async for chunk in chunks:
        if (data := beginning.feed(chunk)) is None:
            if len(beginning.received) > BEGINNING_MOST:
                raise EngineError(f"{decode.id} sent more than {BEGINNING_MOST} bytes and no event")
            continue
        if (status := error_status(data)) is not None:
            raise refusal(decode.id, status, JSON, data)
        return bytes(beginning.received)
    raise EngineError(f"{decode.id} ended its stream before the first event")
