"""A stream is the same in whatever pieces it comes: the same bytes, faults and counts."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_proxy.core.admission.lifetime import cut_short
from pdrelay_proxy.errors import EngineError
from support.clock import Clock
from support.greedy import events, read
from support.scripted import DONE, EVENT, Scripted, call, never, pulled_prefill, router_of
from support.simulated_loop import settle

ERROR = b'data: {"error": {"message": "no", "code": 500}}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'


async def served(parts, *, ends_at_once=False, patience=None, clock=lambda: 0.0):
    """Return the bytes, what went wrong, and what was counted of it."""

    async def decode(_):
        return 200, list(parts)

    engines = Scripted(pulled_prefill, decode, ends_at_once=ends_at_once)
    router = router_of(engines, retries=0, **(patience or {}), clock=clock)
    client = await router.serve(call(stream=True))
    assert not engines.open
    assert router.is_idle()
    legs = {key[::2]: count for key, count in router.telemetry.counters.legs.items() if key[1] == "decode"}
    return client.got, client.error, legs, client.record.error


def cut(data, at):
    places = [0, *sorted({place % len(data) for place in at}), len(data)]
    return [data[a:b] for a, b in pairwise(places) if a < b]


@given(
    more=st.lists(st.sampled_from([EVENT, ERROR, USAGE, b": comment\n\n", b"event: x\ndata: {}\n\n"]), max_size=6),
    ending=st.sampled_from([DONE, b"", b"data: [DO", EngineError("it broke off")]),
    at=st.lists(st.integers(0, 400), max_size=6),
    ends_at_once=st.booleans(),
)
def test_the_pieces_do_not_matter(more, ending, at, ends_at_once):
    """For any events in any pieces, and any end."""
    end = [ending] if isinstance(ending, Exception) else []
    data = b"".join([EVENT, *more])
    rest = ending if isinstance(ending, bytes) else b""
    is_good = rest == DONE
    by_events = asyncio.run(served([EVENT, *more, *([rest] if rest else []), *end]))
    in_pieces = asyncio.run(served([*cut(data + rest, at), *end], ends_at_once=ends_at_once and not end))

    assert in_pieces == by_events
    assert by_events[0] == data + (rest if is_good else b"")
    assert (by_events[1] is None) == is_good
    assert by_events[2] == {("decode-0", "ok" if is_good and ERROR not in more else "bad_response"): 1}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("is_silent", [False, True])
async def test_behind_its_last_event_a_stream_is_whole(is_silent, at_once, resumes):
    """Its connection breaks off, or does not end: the client gets that event once, and no error; the engine is held."""
    clock = Clock()
    stream = list(events({"prompt": "hi", "max_tokens": 3, "return_token_ids": resumes}, name="x"))
    parts = [b"".join(stream)] if at_once else stream
    end = clock.silence(0.06) if is_silent else EngineError("it broke off")
    patience = {"stream_idle_timeout_s": 0.03, "resume_streams": resumes}
    got, said, legs, fault = await served([*parts, end], patience=patience, clock=clock)

    assert (read(got)[3:], got.count(DONE), said, fault) == ((["length"], True), 1, None, None)
    assert legs == {("decode-0", "timeout" if is_silent else "bad_response"): 1}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 2}])
async def test_a_router_that_ends_behind_the_last_event_of_a_stream_ends_it_well(fields, resumes):
    """Its engine is about to end it, too: the client gets no error behind the end, nor the log one."""
    stream = list(events({"prompt": "hi", "max_tokens": 3, "return_token_ids": resumes}, name="x"))

    async def decode(_):
        return 200, [*stream, never()]

    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines, resume_streams=resumes)
    client = router.start(call(stream=True, **fields))
    await settle()
    client.request.interrupt(cut_short())
    await client.end()

    assert (read(client.body)[3:], client.body.count(DONE), client.record.error) == ((["length"], True), 1, None)
    assert client.error is None
    assert not engines.open
    assert router.is_idle()


async def test_a_stream_that_is_silent_too_long_is_given_up():
    """With the blame for the engine."""
    clock = Clock()
    parts = [EVENT, EVENT, clock.silence(0.06)]
    got, said, legs, fault = await served(parts, patience={"stream_idle_timeout_s": 0.03}, clock=clock)

    error = ("EngineTimeoutError", "decode-0 sent nothing for 0.03 s")
    assert (got, said, fault) == (EVENT * 2, error, error[1])
    assert legs == {("decode-0", "timeout"): 1}


async def test_the_timer_goes_by_the_last_piece():
    """It was set before the first one, and goes off several times meanwhile."""
    now = [0.0]

    async def piece():
        now[0] += 60.0
        client.request.check_deadlines(now[0])
        return EVENT

    async def decode(_):
        return 200, [EVENT, *[piece() for _ in range(6)], DONE]

    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines, retries=0, stream_idle_timeout_s=100.0, clock=lambda: now[0])
    client = router.start(call(stream=True))
    await client.end()

    assert (client.got, client.error) == (EVENT * 7 + DONE, None)
