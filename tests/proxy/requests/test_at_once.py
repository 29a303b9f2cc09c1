"""Both legs at once: who starts, who is dropped, and what the client gets to see of it."""

import asyncio

import pytest

from pdrelay_proxy.core.fleet.push_coordinates import CoordinatesState
from pdrelay_proxy.core.model import EngineResponse, InstanceId, Role
from pdrelay_proxy.errors import EngineError, EngineTimeout
from pdrelay_proxy.settings import KvTransferMode
from support.scripted import (
    DONE,
    EVENT,
    Scripted,
    failing,
    good_decode,
    good_prefill,
    never,
    params_of,
    prefilled,
    request_id,
    router_of,
    until,
)

P0 = InstanceId("prefill-0")
ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":400}}'


async def acquainted(engines, **options):
    """A router whose prefill engines have all answered once."""
    prefill, decode = engines.prefill, engines.decode
    engines.prefill, engines.decode = good_prefill, good_decode
    router = router_of(engines, **options)
    for turn in range(len(router.registry.known(Role.PREFILL))):
        await router.serve(name=f"first-{turn}")
    engines.prefill, engines.decode = prefill, decode
    engines.legs.clear()
    return router


async def test_decode_may_answer_first():
    """It has computed the prompt itself (recompute), or its first token was faster than P's HTTP answer."""
    engines = Scripted(never, good_decode)
    router = await acquainted(engines)
    client = await router.serve()

    assert client.body == EVENT + DONE
    assert not engines.open
    assert (client.record.prefill_error, client.record.retries) == (None, ())


async def test_a_prefill_that_fails_after_the_answer_has_begun_is_only_noted():
    """The client's stream is good; the log says what happened behind it."""
    fail, go_on = asyncio.Event(), asyncio.Event()

    async def prefill(_):
        await fail.wait()
        raise EngineError("prefill-0 broke off")

    async def rest():
        await go_on.wait()
        return DONE

    async def decode(_):
        return 200, [EVENT, rest()]

    engines = Scripted(prefill, decode)
    router = await acquainted(engines)
    client = router.start()
    await until(lambda: client.body == EVENT)
    fail.set()
    await until(lambda: engines.of(Role.PREFILL)[0] not in engines.open)
    go_on.set()
    await client.end()

    assert client.body == EVENT + DONE
    assert client.record.prefill_error == "prefill-0: prefill-0 broke off"
    assert client.record.error is None


BAD_PREFILLS = {
    "it breaks off": EngineError("prefill-0 broke off"),
    "it cannot be reached": EngineError("prefill-0 cannot be reached", reached=False),
    "it is silent": EngineTimeout("prefill-0 did not answer"),
    "500": EngineResponse(500, "application/json", b"{}"),
    "503": EngineResponse(503, "application/json", ERROR),
    "no params": EngineResponse(200, "application/json", b"{}"),
}


@pytest.mark.parametrize("bad", BAD_PREFILLS.values(), ids=BAD_PREFILLS)
async def test_a_prefill_that_fails_drops_the_decode_leg_and_both_go_elsewhere(bad):
    """At once, and under new ids: D may still be waiting for what the old ids name."""

    async def decode(leg):
        if request_id(leg) == "r":
            await never(leg)
        return 200, [EVENT, DONE]

    engines = Scripted(failing(bad, then=good_prefill), decode)
    router = await acquainted(engines, x=2, y=1)  # and then it is the turn of prefill-0
    client = router.start()
    for _ in range(1000):  # some milliseconds, in which no timer of the router goes off
        await asyncio.sleep(0)

    assert client.is_over
    await client.end()
    assert client.body == EVENT + DONE
    assert [leg.instance.id for leg in engines.of(Role.PREFILL)] == ["prefill-0", "prefill-1"]
    assert [request_id(leg) for leg in engines.of(Role.DECODE)] == ["r", "r-r1"]
    assert [request_id(leg) for leg in engines.of(Role.PREFILL)] == ["r", "r-r1"]
    assert len({params_of(leg)["transfer_id"] for leg in engines.legs}) == 2
    assert [retry.leg.instance for retry in client.record.retries] == ["prefill-0"]
    # Whoever answers there next may be another, unless it has said that it lives and is only busy.
    assert (router.push_coordinates.coordinates(P0) is not None) == (bad is BAD_PREFILLS["503"])
    assert not engines.open


BAD_DECODES = {
    "it breaks off": EngineError("decode-0 broke off"),
    "500": (500, [ERROR]),
    "503": (503, [ERROR]),
    "the first event is an error": (200, [b'data: {"error":{"code":503,"message":"no room"}}\n\n']),
    "it ends before the first event": (200, []),
}


@pytest.mark.parametrize("bad", BAD_DECODES.values(), ids=BAD_DECODES)
async def test_a_decode_that_fails_drops_the_prefill_leg_and_both_go_elsewhere(bad):
    """What P computes for it is for nobody."""

    async def prefill(leg):
        if request_id(leg) == "r":
            await never(leg)
        return prefilled(leg)

    engines = Scripted(prefill, failing(bad, then=good_decode))
    router = await acquainted(engines, x=1, y=2)
    client = await router.serve()

    assert client.body == EVENT + DONE
    first, second = engines.of(Role.DECODE)
    assert first.instance.id != second.instance.id
    assert [request_id(leg) for leg in engines.of(Role.PREFILL)] == ["r", "r-r1"]
    assert [retry.leg.instance for retry in client.record.retries] == [first.instance.id]
    assert not engines.open


async def test_a_decode_engine_that_got_nothing_is_replaced_alone():
    """The prefill goes on: nobody has heard its ids yet."""
    gone = asyncio.Event()

    async def prefill(leg):
        await gone.wait()
        return prefilled(leg)

    async def decode(leg):
        if len(engines.of(Role.DECODE)) == 1:
            raise EngineError(f"{leg.instance.id} cannot be reached", reached=False)
        gone.set()
        return 200, [EVENT, DONE]

    engines = Scripted(prefill, decode)
    router = await acquainted(engines, x=1, y=2)
    client = await router.serve()

    assert client.body == EVENT + DONE
    assert len(engines.of(Role.PREFILL)) == 1
    first, second = engines.of(Role.DECODE)
    assert first.instance.id != second.instance.id
    assert (first.body, first.headers) == (second.body, second.headers)
    assert str(client.record.retries[0]) == f"{first.instance.id} unreachable"


@pytest.mark.parametrize("role", Role)
async def test_a_refusal_of_either_engine_goes_to_the_client_and_ends_the_other_leg(role):
    """Another engine would refuse the same."""

    async def prefill(leg):
        return EngineResponse(400, "application/json", ERROR) if role is Role.PREFILL else await never(leg)

    async def decode(leg):
        return (400, [ERROR]) if role is Role.DECODE else await never(leg)

    engines = Scripted(prefill, decode)
    router = await acquainted(engines, x=2, y=2)
    client = await router.serve()

    assert (client.status, client.body) == (400, ERROR)
    assert len(engines.legs) == 2
    assert not engines.open
    assert router.push_coordinates.state(P0) is CoordinatesState.PUSH  # it has done nothing wrong


async def test_when_both_legs_fail_the_prefill_is_the_reason():
    """A decode engine that gets no KV cache may say so in its own way."""

    async def prefill(_):
        raise EngineError("prefill-0 broke off")

    async def decode(_):
        raise EngineError("decode-0 broke off")

    router = await acquainted(Scripted(prefill, decode), retries=0)

    assert (await router.serve()).error == ("EngineError", "prefill-0 broke off")


async def test_an_engine_that_restarts_as_one_that_does_not_push_is_believed():
    """An operator changes a flag; the router follows."""

    async def prefill(leg):
        return prefilled(leg, engine="e2", transfer_mode="pull")

    async def decode(leg):
        if params_of(leg)["transfer_mode"] == "push":
            await never(leg)
        return 200, [EVENT, DONE]

    router = await acquainted(Scripted(prefill, decode))
    client = await router.serve()

    assert client.body == EVENT + DONE
    assert client.record.mode == "pull"
    assert router.push_coordinates.state(P0) is CoordinatesState.PULL


async def test_several_engines_behind_one_address_are_served_in_turn():
    """Data parallel ranks: which one takes a request is known from its answer only."""
    ranks = [f"e{number}" for number in (1, 2, 3)]
    count = 0

    async def prefill(leg):
        nonlocal count
        count += 1
        return prefilled(leg, engine=ranks[count % 3])

    async def decode(leg):
        told = params_of(leg)
        if told["remote_engine_id"] != ranks[count % 3] or "remote_block_ids" not in told:
            await never(leg)
        return 200, [EVENT, DONE]

    engines = Scripted(prefill, decode)
    router = await acquainted(engines)
    clients = [await router.serve(name=f"{number}") for number in range(10)]

    assert router.push_coordinates.state(P0) is CoordinatesState.SEVERAL
    assert all(len(client.record.retries) <= 1 for client in clients)
    assert not any(client.record.retries for client in clients[4:])


async def test_told_to_pull_the_router_never_sends_both_at_once():
    """Works with engines that push, too: they are asked one after the other."""
    engines = Scripted(good_prefill, good_decode)
    router = router_of(engines, mode=KvTransferMode.PULL)
    clients = [await router.serve(name=f"{number}") for number in range(3)]

    assert {client.record.mode for client in clients} == {"push_cold"}
