"""Every wait has an end, and each says in its own words what has taken too long."""

import asyncio

import pytest

from pdrelay_proxy.core.model import Api, Role
from pdrelay_proxy.errors import EngineError
from support.clock import Clock
from support.scripted import (
    DONE,
    EVENT,
    Noted,
    Scripted,
    call,
    good_decode,
    never,
    prefilled,
    pulled_prefill,
    request_id,
    router_of,
    until,
)
from support.simulated_loop import simulated

STREAM = {"stream": True}


async def read(engines, clock, **options):
    router = router_of(engines, clock=clock, **options)
    client = await router.serve(call(**STREAM))
    assert not engines.open
    assert router.is_idle()
    return client


@pytest.mark.parametrize("silent", ["no head", "no event"])
async def test_a_stream_that_does_not_begin_is_given_up_and_done_by_another(silent):
    """The decode engine had the parameters: there is a new prefill."""

    clock = Clock()

    async def decode(leg):
        if leg.instance.id == "decode-0":
            silence = clock.silence(0.02)
            return await silence if silent == "no head" else (200, [b": waiting\n\n", silence])
        return await good_decode(leg)

    engines = Scripted(pulled_prefill, decode)
    client = await read(engines, clock, first_token_timeout_s=0.02, y=2)

    assert client.body == EVENT + DONE
    assert len(engines.of(Role.PREFILL)) == 2


async def test_the_only_engine_that_does_not_begin_is_the_clients_error():
    """It had its time; asking it again would double the wait."""
    clock = Clock()
    engines = Scripted(pulled_prefill, lambda _: clock.silence(0.02))
    client = await read(engines, clock, first_token_timeout_s=0.02)

    assert client.error == ("EngineTimeoutError", "decode-0 sent no token within 0.02 s")
    assert len(engines.of(Role.DECODE)) == 1


async def test_a_prefill_that_does_not_answer_is_done_by_another():
    """And its leg is closed before."""

    clock = Clock()

    async def prefill(leg):
        return await (clock.silence(0.02) if leg.instance.id == "prefill-0" else pulled_prefill(leg))

    engines = Scripted(prefill, good_decode)
    client = await read(engines, clock, first_token_timeout_s=0.02, x=2)

    assert client.body == EVENT + DONE
    assert [str(retry) for retry in client.record.retries] == ["prefill-0 timeout"]


async def test_an_engine_that_answers_while_the_router_stands_still_is_not_late():
    """The process was stopped, or starved: what came meanwhile is read before anybody is blamed."""
    loop = simulated()

    async def prefill(leg):
        loop.call_later(3, loop.stand_still, 10)
        await asyncio.sleep(4)
        return await pulled_prefill(leg)

    client = await read(Scripted(prefill, good_decode), loop.time, first_token_timeout_s=5.0)
    assert client.body == EVENT + DONE
    assert not client.record.retries


async def silent_stream(clock):
    """Return a client whose stream has begun, and whose engine may say nothing for 100 s."""

    async def decode(_):
        return 200, [EVENT, never()]

    router = router_of(Scripted(pulled_prefill, decode), stream_idle_timeout_s=100.0, clock=clock)
    client = router.start(call(**STREAM))
    await until(lambda: client.response.begun)
    return client


async def test_an_engine_has_its_full_time_after_the_shortest_pause():
    """Also where the client goes on before the router has looked at the time: then nothing could be heard."""
    now = [0.0]
    client = await silent_stream(lambda: now[0])
    client.request.check_deadlines(0.0)
    now[0] = 99.0
    client.request.pause()
    client.request.resume()
    client.request.check_deadlines(101.0)
    client.request.check_deadlines(200.9)
    assert not client.is_over

    client.request.check_deadlines(201.0)
    assert client.error == ("EngineTimeoutError", "decode-0 sent nothing for 100 s")


async def test_an_engine_that_may_not_send_is_not_late():
    """Its client does not read, however long that takes."""
    now = [0.0]
    client = await silent_stream(lambda: now[0])
    client.request.pause()
    for now[0] in (50.0, 125.0, 200.0, 275.0):
        client.request.check_deadlines(now[0])

    assert not client.is_over
    client.hang_up()


@pytest.mark.parametrize("role", Role)
async def test_a_whole_answer_has_one_limit_for_all_its_tries(role):
    """No engine is blamed for it: what is told of its legs is that they were dropped."""
    notes = Noted()
    now = [0.0]

    async def breaking(_):
        if now[0] >= 40.0:
            await never()
        now[0] += 20.0
        raise EngineError("broke off")

    engines = Scripted(breaking if role is Role.PREFILL else pulled_prefill, breaking)
    patience = {"total_timeout_s": 50.0, "first_token_timeout_s": 300.0 if role is Role.PREFILL else 1.0}
    router = router_of(engines, decode_only_fallback=False, **patience, retries=9, spans=notes, clock=lambda: now[0])
    client = router.start()
    await until(lambda: len(engines.of(role)) == 3 and engines.open)
    client.request.check_deadlines(49.9)
    assert not client.is_over
    client.request.check_deadlines(50.0)

    assert client.error == ("RequestTimeoutError", "the request was not done within 50 s")
    assert notes.told[-2][0] == "ended"
    assert notes.told[-2][1].startswith(role)
    assert notes.told[-2][-1] is None
    assert not engines.open
    assert router.is_idle()


async def test_a_decode_engine_that_does_not_accept_a_connection_got_nothing():
    """Another one takes over, and the prompt is not computed again."""

    clock = Clock()

    async def decode(leg):
        return await (clock.silence(0.05) if leg.instance.id == "decode-0" else good_decode(leg))

    engines = Scripted(pulled_prefill, decode)
    engines.connects = lambda leg: leg.instance.id != "decode-0"
    router = router_of(engines, y=2, first_token_timeout_s=0.05, clock=clock)
    client = await router.serve(call(stream=True))

    assert client.status == 200
    assert len(engines.of(Role.PREFILL)) == 1
    assert [str(retry) for retry in client.record.retries] == ["decode-0 unreachable"]


QUIET = {"stream": True, "include_reasoning": False}
ROLE = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
ANNOUNCED = b'event: response.created\ndata: {"response":{}}\n\n'
ENDED = b'event: response.completed\ndata: {"response":{}}\n\n'


async def reasoned(seconds, piece):
    """What comes behind so many seconds of reasoning that the client does not want."""
    await asyncio.sleep(seconds)
    return piece


@pytest.mark.parametrize(("api", "begins", "ends"), [(Api.CHAT, ROLE, DONE), (Api.RESPONSES, ANNOUNCED, ENDED)])
async def test_a_stream_without_its_reasoning_may_be_quiet_for_as_long_as_the_model_reasons(api, begins, ends):
    """vLLM sends no event for it: a limit for pauses would cut good streams, and hold them against their engines."""

    async def decode(_):
        return 200, [begins, reasoned(1000, EVENT), reasoned(1000, ends)]

    engines = Scripted(pulled_for(api), decode)
    loop = simulated()
    router = router_of(engines, y=2, clock=loop.time)
    async with router.requests:
        client = await router.start(call(api, **QUIET)).end(seconds=3000)

    assert (client.error, client.body) == (None, begins + EVENT + ends)
    assert (len(engines.of(Role.DECODE)), client.record.retries) == (1, ())
    assert router.is_idle()


async def test_a_quiet_stream_has_the_time_of_a_whole_answer_and_no_engine_is_blamed():
    """An engine that hangs is found by its probes."""

    async def decode(_):
        return 200, [ROLE, never()]

    notes = Noted()
    loop = simulated()
    router = router_of(Scripted(pulled_for(Api.CHAT), decode), clock=loop.time, total_timeout_s=500.0, spans=notes)
    async with router.requests:
        client = await router.start(call(Api.CHAT, **QUIET)).end(seconds=1000)

    assert client.error == ("RequestTimeoutError", "the request was not done within 500 s")
    assert notes.told[-2][-1] is None
    assert router.is_idle()


async def test_a_quiet_chat_begins_with_its_first_token():
    """It says who speaks: an engine that does not is replaced in time."""

    async def decode(leg):
        return await never() if leg.instance.id == "decode-0" else (200, [ROLE, EVENT, DONE])

    router = router_of(Scripted(pulled_for(Api.CHAT), decode), y=2, clock=simulated().time)
    async with router.requests:
        client = await router.start(call(Api.CHAT, **QUIET)).end(seconds=1000)

    assert client.body == ROLE + EVENT + DONE
    assert [str(retry) for retry in client.record.retries] == ["decode-0 timeout"]


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": True}, {"include_reasoning": None}])
async def test_a_stream_with_its_reasoning_is_watched(fields):
    """Its engine has something to send with each token."""

    async def decode(_):
        return 200, [ROLE, never()]

    router = router_of(Scripted(pulled_for(Api.CHAT), decode), clock=simulated().time, stream_idle_timeout_s=100.0)
    async with router.requests:
        client = await router.start(call(Api.CHAT, stream=True, **fields)).end(seconds=1000)

    assert client.error == ("EngineTimeoutError", "decode-0 sent nothing for 100 s")


def pulled_for(api):
    """Return a prefill engine that knows requests of an API by their names there."""
    name = {Api.CHAT: "chatcmpl-{}-1", Api.RESPONSES: "resp_{}_0"}[api]

    async def prefill(leg):
        return prefilled(leg, transfer_mode="pull", remote_request_id=name.format(request_id(leg)))

    return prefill
