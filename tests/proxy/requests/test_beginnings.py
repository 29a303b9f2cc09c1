"""The beginning of an engine's answer: bounded, whatever the engine sends."""

import itertools

import pytest

from support.scripted import DONE, EVENT, EVENTS, JSON, Scripted, pulled_prefill, router_of

MIB = 1024 * 1024


class Sending(Scripted):
    """A decode engine that sends the same piece again and again; counts what was taken."""

    def __init__(self, piece, times=None, *, content_type=JSON, status=200, end=b""):
        super().__init__(pulled_prefill, self._decode)
        self.taken = 0
        self._pieces = itertools.repeat(piece) if times is None else itertools.repeat(piece, times)
        self._answer = status, content_type
        self._end = [end] if end else []

    async def _decode(self, _):
        status, content_type = self._answer
        return status, itertools.chain(map(self._count, self._pieces), self._end), content_type

    def _count(self, piece):
        self.taken += len(piece)
        assert self.taken < 200 * MIB
        return piece


async def served(engines):
    client = await router_of(engines, retries=0).serve()
    assert not engines.open
    return client


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end_is_broken(status):
    """An engine that goes mad must not fill the router's memory, with a good status or a bad one."""
    engines = Sending(b"x" * MIB, status=status)

    assert (await served(engines)).error == ("EngineError", "decode-0 answered with more than 67108864 bytes")
    assert engines.taken == 65 * MIB


async def test_the_answer_of_a_prefill_engine_is_bounded_too():
    """It goes through the same memory."""
    engines = Sending(b"x" * MIB)
    engines.prefill = engines.decode

    assert (await served(engines)).error == ("EngineError", "prefill-0 answered with more than 67108864 bytes")
    assert engines.taken == 65 * MIB


async def test_an_answer_may_be_as_big_as_the_bound():
    client = await served(Sending(b"x" * MIB, 64))

    assert (len(client.body), client.status) == (64 * MIB, 200)


async def test_a_big_first_event_is_taken():
    """The bound is for what comes without an event."""
    event = b"data: " + b"x" * (2 * MIB) + b"\n\n" + EVENT
    client = await served(Sending(event, 1, content_type=EVENTS, end=DONE))

    assert client.body == event + DONE
    assert client.response.streams
