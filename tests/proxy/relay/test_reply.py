"""The beginning of a decode engine's answer: bounded, whatever the engine sends."""

from dataclasses import dataclass

import pytest

from support.scripted import EVENT
from xpyd_proxy.core.address import Address
from xpyd_proxy.core.model import Instance, InstanceId, Role
from xpyd_proxy.errors import EngineError
from xpyd_proxy.relay.reply import begin

D = Instance(InstanceId("decode-0"), Role.DECODE, Address("http", "h", 1))
MIB = 1024 * 1024


class Endless:
    """The same piece again and again; counts what was taken."""

    def __init__(self, piece):
        self.piece = piece
        self.taken = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.taken += len(self.piece)
        assert self.taken < 200 * MIB
        return self.piece


class Pieces(Endless):
    """So many pieces, and then the end."""

    def __init__(self, piece, times):
        super().__init__(piece)
        self.left = times

    async def __anext__(self):
        if self.left == 0:
            raise StopAsyncIteration
        self.left -= 1
        return await super().__anext__()


@dataclass
class Streamed:
    chunks: Endless
    content_type: str = "application/json"
    status: int = 200


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end_is_broken(status):
    """An engine that goes mad must not fill the router's memory, with a good status or a bad one."""
    chunks = Endless(b"x" * MIB)
    with pytest.raises(EngineError, match=r"^decode-0 answered with more than 67108864 bytes$"):
        await begin(D, Streamed(chunks, status=status))

    assert chunks.taken == 65 * MIB


async def test_an_answer_may_be_as_big_as_the_bound():
    body, more = await begin(D, Streamed(Pieces(b"x" * MIB, 64)))

    assert (len(body), more) == (64 * MIB, False)


async def test_a_stream_that_never_begins_is_broken():
    """Comments keep a connection alive; a mebibyte of them and no event is no stream of ours."""
    chunks = Endless(b": x\n" * 16_384)
    with pytest.raises(EngineError, match=r"^decode-0 sent more than 1048576 bytes and no event$"):
        await begin(D, Streamed(chunks, "text/event-stream"))

    assert chunks.taken == MIB + 65_536


async def test_a_big_first_event_is_taken():
    """The bound is for what comes without an event."""
    event = b"data: " + b"x" * (2 * MIB) + b"\n\n" + EVENT
    body, more = await begin(D, Streamed(Pieces(event, 1), "text/event-stream"))

    assert (body, more) == (event, True)
