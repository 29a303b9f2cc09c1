"""Both legs at once: who starts, who is dropped, and what the client gets to see of it."""

import asyncio
import json
import re

import pytest

from support.scripted import (
    DONE,
    EVENT,
    Scripted,
    call,
    good_decode,
    good_prefill,
    params_of,
    prefilled,
    relay_of,
    request_id,
)
from xpyd_proxy.core.journey import Journey
from xpyd_proxy.core.learned import State
from xpyd_proxy.core.model import Answer, Api, InstanceId, RequestId, Role
from xpyd_proxy.errors import EngineError, EngineTimeout, Refused
from xpyd_proxy.settings import Mode

P0 = InstanceId("prefill-0")
ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":400}}'


async def served(relay, request=None, name="r"):
    """Serve a request to its end; return its journey and the bytes."""
    journey = Journey(RequestId(name))
    async with relay.serve(request or call(), journey) as reply:
        rest = [chunk async for chunk in reply.rest] if reply.rest else []
    return journey, b"".join([reply.body, *rest])


async def acquainted(engines, **options):
    """A relay whose prefill engines have all answered once."""
    prefill, decode = engines.prefill, engines.decode
    engines.prefill, engines.decode = good_prefill, good_decode
    relay = relay_of(engines, **options)
    for turn in range(len(relay.registry.known(Role.PREFILL))):
        await served(relay, name=f"first-{turn}")
    engines.prefill, engines.decode = prefill, decode
    engines.legs.clear()
    return relay


def meeting():
    """Two legs that only go on once both have started."""
    started = {role: asyncio.Event() for role in Role}

    async def prefill(leg):
        started[Role.PREFILL].set()
        await started[Role.DECODE].wait()
        return prefilled(leg)

    async def decode(leg):
        started[Role.DECODE].set()
        await started[Role.PREFILL].wait()
        return 200, [EVENT, DONE]

    return Scripted(prefill, decode)


async def wait_for_ever(_):
    await asyncio.Event().wait()


async def test_the_first_request_goes_from_engine_to_engine_and_teaches_the_router():
    """Where a prefill engine is stands in its answer: nobody configures it, and nobody asks for it twice."""
    engines = Scripted(good_prefill, good_decode)
    relay = relay_of(engines)
    journey, body = await served(relay)

    assert body == EVENT + DONE
    assert journey.route == "push, prefill first"
    assert relay.learned.state(P0) is State.PUSH
    prefill, decode = engines.legs
    told = params_of(decode)
    assert told.pop("transfer_id") == params_of(prefill)["transfer_id"]
    assert told == json.loads(prefilled(prefill).body)["kv_transfer_params"]


async def test_later_requests_start_both_legs_before_either_has_answered():
    """That is what push is for: D has its memory ready when P has its first block."""
    engines = meeting()
    relay = await acquainted(engines)
    async with asyncio.timeout(5):
        journey, body = await served(relay)

    assert body == EVENT + DONE
    assert journey.server_timing() == (
        'route;desc="push", prefill;desc="prefill-0";dur=0.0, decode;desc="decode-0";dur=0.0'
    )


@pytest.mark.parametrize(("api", "name"), [(Api.COMPLETIONS, "cmpl-r-0"), (Api.CHAT, "chatcmpl-r")])
async def test_the_decode_engine_is_told_all_it_needs_and_what_the_prefill_engine_is_told(api, name):
    """In-tree engines die of a missing key, and wait for ever when the ids differ."""

    async def prefill(leg):
        return prefilled(leg, remote_request_id=f"{name}-0123abcd")

    engines = Scripted(prefill, good_decode)
    relay = await acquainted(engines)
    await served(relay, call(api))

    prefill_leg, decode_leg = engines.of(Role.PREFILL)[0], engines.of(Role.DECODE)[0]
    assert params_of(decode_leg) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "remote_request_id": name,
        "transfer_id": params_of(prefill_leg)["transfer_id"],
        "transfer_mode": "push",
    }
    assert re.fullmatch("xfer-[0-9a-f]{32}", params_of(prefill_leg)["transfer_id"])
    assert request_id(prefill_leg) == request_id(decode_leg) == "r"
    assert prefill_leg.path == decode_leg.path == api


async def test_prefill_may_be_long_done_when_decode_answers():
    """The usual order: the last block has arrived, then the first token is made."""
    go = asyncio.Event()

    async def decode(_):
        await go.wait()
        return 200, [EVENT, DONE]

    engines = Scripted(good_prefill, decode)
    relay = await acquainted(engines)
    serving = asyncio.create_task(served(relay))
    await until(lambda: [leg.instance.role for leg in engines.open] == [Role.DECODE])
    go.set()

    assert (await serving)[1] == EVENT + DONE


async def test_decode_may_answer_first():
    """It has computed the prompt itself (recompute), or its first token was faster than P's HTTP answer."""
    engines = Scripted(wait_for_ever, good_decode)
    relay = await acquainted(engines)
    journey, body = await served(relay)

    assert body == EVENT + DONE
    assert not engines.open
    assert (journey.late, journey.retries) == (None, [])


async def test_a_prefill_that_fails_after_the_answer_has_begun_is_only_noted():
    """The client's stream is good; the log says what happened behind it."""
    fail = asyncio.Event()

    async def prefill(_):
        await fail.wait()
        raise EngineError("prefill-0 broke off")

    engines = Scripted(prefill, good_decode)
    relay = await acquainted(engines)
    journey = Journey(RequestId("r"))
    async with relay.serve(call(), journey) as reply:
        fail.set()
        await until(lambda: not engines.of(Role.PREFILL) or engines.of(Role.PREFILL)[0] not in engines.open)
        rest = [chunk async for chunk in reply.rest]

    assert rest == [DONE]
    assert journey.late == "prefill-0: prefill-0 broke off"
    assert journey.fault is None


BAD_PREFILLS = {
    "it breaks off": EngineError("prefill-0 broke off"),
    "it cannot be reached": EngineError("prefill-0 cannot be reached", reached=False),
    "it is silent": EngineTimeout("prefill-0 did not answer"),
    "500": Answer(500, "application/json", b"{}"),
    "503": Answer(503, "application/json", ERROR),
    "no params": Answer(200, "application/json", b"{}"),
}


@pytest.mark.parametrize("bad", BAD_PREFILLS.values(), ids=BAD_PREFILLS)
async def test_a_prefill_that_fails_drops_the_decode_leg_and_both_go_elsewhere(bad):
    """Within 100 ms, and under new ids: D may still be waiting for what the old ids name."""

    async def prefill(leg):
        if leg.instance.id == failing:
            if isinstance(bad, Exception):
                raise bad
            return bad
        return prefilled(leg)

    async def decode(leg):
        if request_id(leg) == "r":
            await wait_for_ever(leg)
        return 200, [EVENT, DONE]

    engines = Scripted(prefill, decode)
    relay = await acquainted(engines, x=2, y=1)
    failing = InstanceId("prefill-0")  # whose turn it is
    start = asyncio.get_running_loop().time()
    journey, body = await served(relay)

    assert asyncio.get_running_loop().time() - start < 0.1
    assert body == EVENT + DONE
    assert [leg.instance.id for leg in engines.of(Role.PREFILL)] == ["prefill-0", "prefill-1"]
    assert [request_id(leg) for leg in engines.of(Role.DECODE)] == ["r", "r-r1"]
    assert [request_id(leg) for leg in engines.of(Role.PREFILL)] == ["r", "r-r1"]
    assert len({params_of(leg)["transfer_id"] for leg in engines.legs}) == 2
    assert [retry.visit.instance for retry in journey.retries] == ["prefill-0"]
    # Whoever answers there next may be another, unless it has said that it lives and is only busy.
    assert (relay.learned.coordinates(failing) is not None) == (bad is BAD_PREFILLS["503"])
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
            await wait_for_ever(leg)
        return prefilled(leg)

    async def decode(leg):
        if request_id(leg) == "r":
            if isinstance(bad, Exception):
                raise bad
            return bad
        return 200, [EVENT, DONE]

    engines = Scripted(prefill, decode)
    relay = await acquainted(engines, x=1, y=2)
    journey, body = await served(relay)

    assert body == EVENT + DONE
    first, second = engines.of(Role.DECODE)
    assert first.instance.id != second.instance.id
    assert [request_id(leg) for leg in engines.of(Role.PREFILL)] == ["r", "r-r1"]
    assert [retry.visit.instance for retry in journey.retries] == [first.instance.id]
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
    relay = await acquainted(engines, x=1, y=2)
    journey, body = await served(relay)

    assert body == EVENT + DONE
    assert len(engines.of(Role.PREFILL)) == 1
    first, second = engines.of(Role.DECODE)
    assert first.instance.id != second.instance.id
    assert (first.body, first.headers) == (second.body, second.headers)
    assert str(journey.retries[0]) == f"{first.instance.id} cannot be reached"


@pytest.mark.parametrize("role", Role)
async def test_a_refusal_of_either_engine_goes_to_the_client_and_ends_the_other_leg(role):
    """Another engine would refuse the same."""

    async def prefill(leg):
        return Answer(400, "application/json", ERROR) if role is Role.PREFILL else await wait_for_ever(leg)

    async def decode(leg):
        return (400, [ERROR]) if role is Role.DECODE else await wait_for_ever(leg)

    engines = Scripted(prefill, decode)
    relay = await acquainted(engines, x=2, y=2)
    with pytest.raises(Refused) as caught:
        await served(relay)

    assert (caught.value.status, caught.value.body) == (400, ERROR)
    assert len(engines.legs) == 2
    assert not engines.open
    assert relay.learned.state(P0) is State.PUSH  # it has done nothing wrong


async def test_when_both_legs_fail_the_prefill_is_the_reason():
    """A decode engine that gets no KV cache may say so in its own way."""

    async def prefill(_):
        raise EngineError("prefill-0 broke off")

    async def decode(_):
        raise EngineError("decode-0 broke off")

    relay = await acquainted(Scripted(prefill, decode), retries=0)
    with pytest.raises(EngineError, match="prefill-0"):
        await served(relay)


async def test_a_prefill_engine_that_has_restarted_is_learned_anew():
    """D was told to wait for an engine that is gone: it is dropped, and told better."""
    engine = ["e1"]

    async def prefill(leg):
        return prefilled(leg, engine=engine[0])

    async def decode(leg):
        if params_of(leg)["remote_engine_id"] != engine[0]:
            await wait_for_ever(leg)
        return 200, [EVENT, DONE]

    engines = Scripted(prefill, decode)
    relay = await acquainted(engines)
    engine[0] = "e2"
    journeys = [(await served(relay, name=name))[0] for name in ("a", "b")]

    assert [str(retry) for retry in journeys[0].retries] == ["prefill-0 restarted"]
    assert [journey.route for journey in journeys] == ["push, prefill first", "push"]
    assert [params_of(leg)["remote_engine_id"] for leg in engines.of(Role.DECODE)] == ["e1", "e2", "e2"]
    assert not engines.open


async def test_an_engine_that_restarts_as_one_that_does_not_push_is_believed():
    """An operator changes a flag; the router follows."""

    async def prefill(leg):
        return prefilled(leg, engine="e2", transfer_mode="pull")

    async def decode(leg):
        if params_of(leg)["transfer_mode"] == "push":
            await wait_for_ever(leg)
        return 200, [EVENT, DONE]

    relay = await acquainted(Scripted(prefill, decode))
    journey, body = await served(relay)

    assert body == EVENT + DONE
    assert journey.route is None
    assert relay.learned.state(P0) is State.PULL


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
            await wait_for_ever(leg)
        return 200, [EVENT, DONE]

    engines = Scripted(prefill, decode)
    relay = await acquainted(engines)
    journeys = [(await served(relay, name=f"{number}"))[0] for number in range(10)]

    assert relay.learned.state(P0) is State.SEVERAL
    assert all(len(journey.retries) <= 1 for journey in journeys)
    assert not any(journey.retries for journey in journeys[4:])


async def test_requests_that_come_before_the_first_answer_wait_for_nobody():
    """Each goes in turn and teaches the same; there is no probe that could hang for all of them."""
    engines = Scripted(good_prefill, good_decode)
    relay = relay_of(engines)
    go = asyncio.Event()

    async def slow(leg):
        await go.wait()
        return prefilled(leg)

    engines.prefill = slow
    tasks = [asyncio.create_task(served(relay, name=f"r{number}")) for number in range(20)]
    await until(lambda: len(engines.open) == 20)
    go.set()
    journeys = [journey for journey, _ in await asyncio.gather(*tasks)]

    assert {journey.route for journey in journeys} == {"push, prefill first"}
    assert len(engines.of(Role.PREFILL)) == 20
    assert (await served(relay))[0].route == "push"


@pytest.mark.parametrize("stage", ["before", "between", "during"])
async def test_a_client_that_hangs_up_ends_both_legs(stage):
    """At once, wherever they are."""

    async def prefill(leg):
        return prefilled(leg) if stage == "between" else await wait_for_ever(leg)

    async def decode(leg):
        return (200, [EVENT, wait_for_ever(leg)]) if stage == "during" else await wait_for_ever(leg)

    engines = Scripted(prefill, decode)
    relay = await acquainted(engines)
    serving = asyncio.create_task(served(relay))
    await until(lambda: len(engines.open) == (1 if stage == "between" else 2) and len(engines.legs) == 2)
    await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.wait((serving,), timeout=1)

    assert serving.cancelled()
    assert not engines.open


@pytest.mark.parametrize("role", Role)
async def test_a_bug_leaves_no_leg_running(role):
    """What is nobody's planned failure must not cost an engine its memory."""

    async def bug(_):
        raise ZeroDivisionError

    engines = Scripted(bug, wait_for_ever) if role is Role.PREFILL else Scripted(wait_for_ever, bug)
    relay = await acquainted(engines)
    with pytest.raises(ZeroDivisionError):
        await served(relay)

    assert not engines.open


async def test_told_to_pull_the_router_never_sends_both_at_once():
    """Works with engines that push, too: they are asked one after the other."""
    engines = Scripted(good_prefill, good_decode)
    relay = relay_of(engines, mode=Mode.PULL)
    journeys = [(await served(relay, name=f"{number}"))[0] for number in range(3)]

    assert {journey.route for journey in journeys} == {"push, prefill first"}


async def test_told_to_push_the_router_does_not_put_up_with_less():
    """An engine that says nothing is taken to push; one that says it pulls would kill the decode engine."""

    async def silent(leg):
        return prefilled(leg, transfer_mode=None)

    async def pulls(leg):
        return prefilled(leg, transfer_mode="pull")

    engines = Scripted(silent, good_decode)
    relay = relay_of(engines, mode=Mode.PUSH, retries=0)
    assert [(await served(relay))[0].route for _ in range(2)] == ["push, prefill first", "push"]

    engines.prefill = pulls
    with pytest.raises(EngineError, match="prefill-0 does not push"):
        await served(relay_of(engines, mode=Mode.PUSH, retries=0))


async def until(true, *, seconds=5):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.001)
