"""Every wait has an end, and each says in its own words what has taken too long."""

import asyncio

import pytest

from support.scripted import DONE, EVENT, Scripted, call, good_decode, prefilled, relay_of
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.model import RequestId, Role
from xpyd_proxy.core.rules import Patience
from xpyd_proxy.errors import EngineTimeout, OutOfTime

STREAM = {"stream": True}


async def pulled(leg):
    return prefilled(leg, transfer_mode="pull")


async def never(_):
    await asyncio.Event().wait()


async def read(engines, *, patience, got=None, **options):
    relay = relay_of(engines, patience=patience, **options)
    got = [] if got is None else got
    async with asyncio.timeout(5), relay.serve(call(**STREAM), Journey(RequestId("r"))) as reply:
        got.append(reply.body)
        async for chunk in reply.rest:
            got.append(chunk)
    return got


@pytest.mark.parametrize("silent", ["no head", "no event"])
async def test_a_stream_that_does_not_begin_is_given_up_and_done_by_another(silent):
    """The decode engine had the parameters: there is a new prefill."""

    async def decode(leg):
        if leg.instance.id == "decode-0":
            return await never(leg) if silent == "no head" else (200, [b": waiting\n\n", never(leg)])
        return await good_decode(leg)

    engines = Scripted(pulled, decode)
    got = await read(engines, patience=Patience(first_token_s=0.02), y=2)

    assert b"".join(got) == EVENT + DONE
    assert len(engines.of(Role.PREFILL)) == 2
    assert not engines.open


async def test_the_only_engine_that_does_not_begin_is_the_clients_error():
    """It had its time; asking it again would double the wait."""
    engines = Scripted(pulled, never)
    with pytest.raises(EngineTimeout, match=r"decode-0 sent no token within 0\.02 s"):
        await read(engines, patience=Patience(first_token_s=0.02))

    assert not engines.open


async def test_a_stream_that_falls_silent_is_closed():
    """What came before is with the client; the engine's request does not stay open for ever."""

    async def decode(leg):
        return 200, [EVENT, EVENT, never(leg)]

    engines, got = Scripted(pulled, decode), []
    with pytest.raises(EngineTimeout, match=r"decode-0 sent nothing for 0\.02 s"):
        await read(engines, patience=Patience(idle_s=0.02), got=got)

    assert got == [EVENT, EVENT]
    assert not engines.open


async def test_a_stream_that_goes_on_is_not_silent():
    """Only the pauses count, not the length."""

    async def piece():
        await asyncio.sleep(0.02)
        return EVENT

    async def decode(_):
        return 200, [EVENT, *(piece() for _ in range(5)), DONE]

    got = await read(Scripted(pulled, decode), patience=Patience(idle_s=0.08, first_token_s=0.08))

    assert b"".join(got) == EVENT * 6 + DONE


async def test_a_stream_may_have_a_limit_for_all_of_it():
    """Off by default; it counts from the first leg."""

    async def decode(leg):
        return 200, [EVENT, EVENT, never(leg)]

    engines = Scripted(pulled, decode)
    with pytest.raises(OutOfTime, match=r"the stream was not complete within 0\.06 s"):
        await read(engines, patience=Patience(stream_s=0.06))

    assert not engines.open
    assert Patience().stream_s is None


@pytest.mark.parametrize("role", Role)
async def test_a_whole_answer_has_one_limit_for_all_its_tries(role):
    """No engine is blamed for it: the watchers hear of legs that were dropped."""
    told = []

    class Watcher:
        def began(self, *_):
            pass

        def answered(self, *_):
            pass

        def ended(self, instance, request, failure, /):
            told.append((instance.role, failure))

    engines = Scripted(never if role is Role.PREFILL else pulled, never)
    relay = relay_of(engines, patience=Patience(whole_s=0.03, first_token_s=0.001), watchers=(Watcher(),))
    with pytest.raises(OutOfTime, match=r"the request was not done within 0\.03 s"):
        async with relay.serve(call(), Journey(RequestId("r"))):
            pass

    assert told[-1] == (role, None)
    assert not engines.open
