"""A stream that is poured is the stream that is read piece by piece: the same bytes, faults, watchers and limits."""

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.scripted import DONE, EVENT, Scripted, Streamed, call, prefilled, relay_of
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import RequestId, Role
from xpyd_proxy.core.retries import Failure
from xpyd_proxy.core.rules import Patience
from xpyd_proxy.errors import EngineError, EngineTimeout, OutOfTime

ERROR = b'data: {"error": {"message": "no", "code": 500}}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'


class Delivered:
    """Chunks that can be delivered: nothing comes while they are paused."""

    def __init__(self, chunks):
        self._chunks = chunks
        self._open = asyncio.Event()
        self._open.set()

    def __aiter__(self):
        return self

    async def __anext__(self):
        return await anext(self._chunks)

    async def deliver(self, sink):
        async for chunk in self._chunks:
            await self._open.wait()
            sink(chunk)

    def pause(self):
        self._open.clear()

    def resume(self):
        self._open.set()


class Delivering(Scripted):
    """Engines whose streams can be delivered."""

    @asynccontextmanager
    async def stream(self, leg, *, sent=lambda: None):
        async with super().stream(leg, sent=sent) as stream:
            yield Streamed(stream.status, Delivered(stream.chunks))


class Told:
    """A watcher, and an auditor."""

    def __init__(self):
        self.seen = []

    def began(self, *_):
        pass

    def answered(self, *_):
        pass

    def ended(self, instance, _request, failure, /):
        if instance.role is Role.DECODE:
            self.seen.append(failure)

    def differed(self, *engines):
        self.seen.append(engines)


async def pulled(leg):
    return prefilled(leg, transfer_mode="pull")


async def served(parts, *, pour, during=None, patience=None):
    """Return the bytes, what went wrong, and what was told of it."""

    async def decode(leg):
        return 200, [part(leg) if callable(part) else part for part in parts]

    engines, told, got, fault = Delivering(pulled, decode), Told(), [], None
    relay = relay_of(engines, watchers=(told,), retries=0, patience=patience or Patience())
    journey = Journey(RequestId("r"))
    async with asyncio.timeout(5):
        try:
            async with relay.serve(call(stream=True), journey) as reply:
                got.append(reply.body)
                if pour:
                    assert reply.pouring is not None
                    await reply.pouring.into(got.append if during is None else during(reply.pouring, got))
                else:
                    async for part in reply.rest:
                        got.append(part)
        except (EngineError, OutOfTime) as error:
            fault = type(error), str(error)
    assert not engines.open
    return b"".join(got), fault, told.seen, journey.fault


async def never(_):
    await asyncio.Event().wait()


def cut(data, at):
    places = [0, *sorted({place % len(data) for place in at}), len(data)]
    return [data[a:b] for a, b in pairwise(places) if a < b]


@given(
    events=st.lists(st.sampled_from([EVENT, ERROR, USAGE, b": comment\n\n", b"event: x\ndata: {}\n\n"]), max_size=6),
    ending=st.sampled_from([DONE, b"", b"data: [DO", EngineError("it broke off")]),
    at=st.lists(st.integers(0, 400), max_size=6),
)
def test_both_are_the_same(events, ending, at):
    """For any events in any pieces, and any end."""
    end = [ending] if isinstance(ending, Exception) else []
    data = b"".join([EVENT, *events]) + (ending if isinstance(ending, bytes) else b"")
    parts = [*cut(data, at), *end]

    poured, read = (asyncio.run(served(parts, pour=pour)) for pour in (True, False))

    assert poured == read


@pytest.mark.parametrize(
    ("parts", "patience", "fault", "blamed"),
    [
        ([EVENT, EVENT, never], Patience(idle_s=0.03), (EngineTimeout, "decode-0 sent nothing for 0.03 s"), 1),
        (
            [EVENT, EVENT, never],
            Patience(stream_s=0.05),
            (OutOfTime, "the stream was not complete within 0.05 s"),
            False,
        ),
    ],
    ids=["silent", "too long"],
)
@pytest.mark.parametrize("pour", [True, False])
async def test_what_takes_too_long_is_given_up(parts, patience, fault, blamed, pour):
    """In the same words, and with the same blame."""
    assert await served(parts, pour=pour, patience=patience) == (
        EVENT * 2,
        fault,
        [Failure.SILENT if blamed else None],
        None,
    )


async def piece(_):
    await asyncio.sleep(0.03)
    return EVENT


async def test_the_timer_goes_by_the_last_piece():
    """It was set before the first one, and goes off several times meanwhile."""
    body, fault, _, _ = await served([EVENT, *[piece] * 6, DONE], pour=True, patience=Patience(idle_s=0.09))

    assert (body, fault) == (EVENT * 7 + DONE, None)


async def test_an_engine_that_had_to_wait_is_not_silent():
    """The time that the client took is its own; once it goes on, the engine has its full time again."""

    def slow(pouring, got):
        def sink(data):
            got.append(data)
            if len(got) == 2:
                pouring.pause()
                asyncio.get_running_loop().call_later(0.15, pouring.resume)

        return sink

    body, fault, _, _ = await served(
        [EVENT, EVENT, piece, DONE], pour=True, during=slow, patience=Patience(idle_s=0.06)
    )

    assert (body, fault) == (EVENT * 3 + DONE, None)


async def test_who_leaves_while_it_pours_is_not_out_of_time():
    """A cancellation from outside stays one."""
    pouring = asyncio.create_task(served([EVENT, never], pour=True))
    await asyncio.sleep(0.02)
    pouring.cancel()

    with pytest.raises(asyncio.CancelledError):
        await pouring
