"""One client's mistake does not cost another's request: what becomes of the engines while some requests are wrong."""

import itertools
import json

import pytest

from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.http.bounded_body import ANSWER_MOST
from pdrelay_proxy.core.model import Api, EngineResponse, RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.sse import LINE_MOST
from pdrelay_proxy.errors import EngineError, EngineTimeout
from pdrelay_proxy.settings import Settings
from support.greedy import events, read
from support.scripted import (
    DONE,
    EVENT,
    Asked,
    Scripted,
    call,
    good_decode,
    never,
    prefilled,
    pulled_prefill,
    router_of,
)
from support.simulated_loop import settle

JSON = "application/json"
ERROR = b'{"error":{"message":"no","type":"x","param":null,"code":500}}'
DEEP = b'data: {"tools":' + b'{"a":' * 500 + b'{"kv_transfer_params":{}}' + b"}" * 500 + b"}\n\n"
# What engines do with a wrong request: each fails it, and all others as well.
WRONG = {
    "no such path": (404, [b'{"detail":"Not Found"}'], JSON),
    "not allowed": (405, [b'{"detail":"Method Not Allowed"}'], JSON),
    "mesh": (403, [b"RBAC: access denied"], "text/plain"),
    "too large": (413, [b"<html></html>"], "text/html"),
    "invalid": (422, [b'{"detail":[{"loc":["body"],"msg":"bad","type":"x"}]}'], JSON),
    "not implemented": (501, [ERROR], JSON),
    "fails": (500, [ERROR], JSON),
    "fails without words": (500, [], ""),
    "fails in its stream": (200, [b"data: " + ERROR + b"\n\n"]),
    "breaks off": EngineError("broke off"),
    "sends nothing": (200, []),
    "no stream": (200, [b'{"kv_transfer_params":{'], JSON),
}
# These count at once: nothing else tells that an engine's core hangs, or that what stands before it cuts streams off.
AT_ONCE = {"hangs": EngineTimeout("no token"), "breaks off in its stream": (200, [EVENT, EngineError("broke off")])}


def wrong(kind):
    return Asked("/v1/completions", json.dumps({"prompt": f"wrong {kind}", "model": "m"}).encode())


def prompt_of(leg):
    return json.loads(leg.body).get("prompt", "")


async def decode(leg):
    """Serve what is right."""
    kind = str(prompt_of(leg)).removeprefix("wrong ")
    outcome = (WRONG | AT_ONCE).get(kind)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome or await good_decode(leg)


def fleet(prefill=pulled_prefill, decode=decode, *, x=1, y=3, is_probed=True, breaking=None, **rules):
    """A router with usual limits, whose engines answer their probes."""
    router = router_of(Scripted(prefill, decode), x, y, breaking=breaking or Settings(), **rules)
    if is_probed:
        for member in router.registry.members():
            member.life.seen(now=0)
    return router


def states(router):
    return {member.life.state for member in router.registry.members()}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("engines", [1, 2, 3])
async def test_a_client_that_sends_nothing_but_wrong_requests_takes_no_engine_from_others(kind, engines):
    """Seven were enough to eject the only decode engine."""
    router = fleet(y=engines)
    await router.serve()  # the path is known to be served
    for _ in range(30):
        assert (await router.serve(wrong(kind))).status >= 400
        assert (await router.serve()).body == EVENT + DONE

    assert states(router) == {HealthState.HEALTHY}


async def test_a_moment_of_404s_of_a_mesh_shuts_no_path_that_was_served():
    """Also when metrics have been read, and engines were removed, since it was served: all are asked as before."""
    meshed = [False]

    async def side(leg):
        return (404, [b"no route"], "text/plain") if meshed[0] else await good_decode(leg)

    async def prefill(leg):
        return EngineResponse(404, "text/plain", b"no route") if meshed[0] else prefilled(leg, transfer_mode="pull")

    for asked in (call(), call(n=2)):
        router = fleet(prefill, side, x=2)
        for _ in range(6):
            assert (await router.serve(asked)).status == 200
        router.telemetry.keep(frozenset(member.instance.id for member in router.registry.members()))
        meshed[0] = True
        for _ in range(6):
            assert (await router.serve(asked)).status == 404
        meshed[0] = False

        assert [(await router.serve(asked)).status for _ in range(6)] == [200] * 6


async def test_of_a_load_with_every_tenth_request_wrong_all_others_are_served():
    """One prefill engine, three decode engines, and all the ways to be wrong."""
    router = fleet()
    kinds = itertools.cycle(WRONG)
    statuses = []
    for number in range(400):
        client = await router.serve(wrong(next(kinds)) if number % 10 == 9 else None)
        if number % 10 != 9:
            statuses.append(client.status)

    assert statuses == [200] * 360
    assert states(router) == {HealthState.HEALTHY}


@pytest.mark.parametrize("role", Role)
async def test_an_engine_that_fails_what_others_serve_is_ejected_all_the_same(role):
    """A real fault must not hide behind wrong requests."""

    async def bad(leg):
        return (500, [ERROR], JSON) if leg.instance.id.endswith("-0") else await good_decode(leg)

    async def bad_prefill(leg):
        return EngineResponse(500, JSON, ERROR) if leg.instance.id.endswith("-0") else prefilled(leg)

    router = fleet(bad_prefill if role is Role.PREFILL else pulled_prefill, bad if role is Role.DECODE else decode, x=3)
    for _ in range(30):
        assert (await router.serve()).status == 200
    away = [m.instance.id for m in router.registry.members() if m.life.state is HealthState.EJECTED]

    assert away == [f"{role}-0"]


async def test_requests_eject_no_more_than_half_of_a_role():
    """Three of four engines fail, and answer their probes: two stay in, for the fourth cannot bear all."""

    async def bad(leg):
        return await good_decode(leg) if leg.instance.id == "decode-3" else (500, [ERROR], JSON)

    router = fleet(decode=bad, y=4, retries=5)
    for _ in range(60):
        assert (await router.serve()).status == 200

    assert [member.life.state for member in router.registry.members()].count(HealthState.EJECTED) == 2


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("kind", AT_ONCE)
async def test_requests_that_no_engine_answers_to_the_end_leave_half_of_them_to_the_others(kind, engines):
    """The one that is left gets all."""
    router = fleet(y=engines)
    for _ in range(30):
        assert (await router.serve(wrong(kind))).request.failure is not None
        assert (await router.serve()).body == EVENT + DONE

    away = [member.life.state for member in router.registry.members()].count(HealthState.EJECTED)
    assert away <= engines / 2


async def test_an_engine_that_is_gone_is_ejected_even_as_the_last_one():
    """Nothing can be sent there, whoever asks: the answer is then a 503 that says when to come back."""

    async def gone(leg):
        raise EngineError("it cannot be reached", reached=False)

    router = fleet(decode=gone, y=1)
    statuses = [(await router.serve()).status for _ in range(9)]

    assert statuses[0] == 502
    assert statuses[-1] == 503


async def test_a_request_that_has_failed_elsewhere_is_not_the_trial_of_an_engine():
    """A wrong request would send one engine after the other back to rest."""
    router = fleet(y=2)
    life = router.registry.get("decode-1").life
    for number in range(5):
        life.failed(RequestId(f"r{number}"), Failure.UNREACHABLE, now=-10.0)
    assert life.may_serve(now=0)
    life.chosen(now=0)
    life.claimed(RequestId("another request's trial"))
    assert (await router.serve(wrong("fails"))).status == 500
    life.released(RequestId("another request's trial"))

    assert life.state is HealthState.HALF_OPEN


@pytest.mark.parametrize(
    "first",
    [
        b"data: " + b"x" * (2 * 1024 * 1024) + b"\n\n",
        b": ping\n" * 400_000 + EVENT,
        b"event: response.created\ndata: " + b"x" * (9 * 1024 * 1024) + b"\n\n" + EVENT,
        DEEP,
    ],
    ids=["long event", "many lines", "long preamble", "deep"],
)
async def test_a_long_beginning_of_a_stream_passes(first):
    """Echo with logprobs, the ids of a long prompt, a tool's schema: the limit is that of a line."""

    async def long(leg):
        return 200, [first[at : at + 65536] for at in range(0, len(first), 65536)] + [DONE]

    router = fleet(decode=long, y=1)
    client = await router.serve(call(n=2))

    assert client.status == 200
    assert client.body == first.replace(b'"kv_transfer_params":{}', b"").replace(b"data: {", b"data: {") + DONE
    assert states(router) == {HealthState.HEALTHY}


@pytest.mark.parametrize(
    ("content_type", "size"), [("text/event-stream", LINE_MOST), (JSON, ANSWER_MOST)], ids=["line", "whole"]
)
async def test_what_is_above_a_limit_of_the_router_is_one_try_and_no_engines_failure(content_type, size):
    """Another engine would answer the same."""
    piece = b"x" * (1024 * 1024)

    async def endless(leg):
        return 200, [piece] * (size // len(piece) + 1), content_type

    engines = Scripted(pulled_prefill, endless)
    router = router_of(engines, y=3, breaking=Settings())
    client = await router.serve(call(n=2))

    assert client.status == 502
    assert len(engines.legs) == 1
    ends = {outcome: count for (_, _, outcome), count in router.telemetry.counters.legs.items()}
    assert ends == {"answer_refused": 1}


BREAK = EngineError("broke off")
# How the answers of an engine end that it has begun well.
ENDS = {
    "stream breaks off": (200, [EVENT, BREAK]),
    "stream is not complete": (200, [EVENT]),
    "stream hangs": (200, [EVENT, EngineTimeout("hangs")]),
    "whole answer breaks off": (200, [b'{"id":', BREAK], JSON),
}
ASKS = {
    "completions": call(),
    "several answers": call(n=2),
    "chat": call(Api.CHAT, stream=True),
    "chat, several answers": call(Api.CHAT, stream=True, n=2),
    "messages": call(Api.MESSAGES, stream=True, max_tokens=9),
    "responses": Asked(Api.RESPONSES.value, b'{"input":"hi","stream":true}'),
}


def breaking_engine(answer, name="decode-0"):
    async def side(leg):
        return answer if leg.instance.id == name else await good_decode(leg)

    return side


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("end", ENDS)
async def test_an_engine_whose_answers_all_break_off_is_ejected_although_it_answers_its_probes(end, ask, retries):
    """Each began well, which says nothing of how it goes on."""
    router = fleet(decode=breaking_engine(ENDS[end]), retries=retries)
    name = "decode-0"
    broken = 0
    numbers = itertools.count()
    while router.registry.get(name).life.state is HealthState.HEALTHY:
        client = await router.serve(ASKS[ask], f"r{next(numbers)}")
        broken += client.request.failure is not None or bool(client.record.retries)
        for member in router.registry.members():
            member.life.seen(now=0)
        assert broken <= 5

    assert broken == 5
    assert states(router) == {HealthState.HEALTHY, HealthState.EJECTED}
    assert [(await router.serve(ASKS[ask])).status for _ in range(6)] == [200] * 6


@pytest.mark.parametrize("end", ["stream breaks off", "stream is not complete", "stream hangs"])
async def test_an_engine_whose_streams_all_break_off_is_ejected_where_others_go_on_with_them(end):
    """The client sees nothing of it; each of its streams costs another engine a prompt."""
    stream = list(events({"prompt": "hi", "max_tokens": 12}, name="cmpl-r"))

    async def side(leg):
        whole = list(events(json.loads(leg.body), name="cmpl-r"))
        return (200, [*whole[:3], *ENDS[end][1][1:]]) if leg.instance.id == "decode-0" else (200, whole)

    router = fleet(decode=side, resume_streams=True)
    asked = call(stream=True, temperature=0, max_tokens=12)
    retries = 0
    for number in range(15):
        client = await router.serve(asked, f"r{number}")
        assert read(client.body) == read(b"".join(stream))
        retries += len(client.record.retries)
        for member in router.registry.members():
            member.life.seen(now=0)

    assert retries == 5
    assert router.registry.get("decode-0").life.state is HealthState.EJECTED


@pytest.mark.parametrize("end", ENDS)
async def test_the_only_engine_stays_whatever_breaks_off_and_says_so(end):
    """Its probes are answered, and nothing else could serve."""
    router = fleet(decode=breaking_engine(ENDS[end]), y=1)
    life = router.registry.get("decode-0").life
    for _ in range(9):
        await router.serve()
        life.seen(now=0)

    assert life.state is HealthState.HEALTHY
    assert life.why.startswith("answers its probes, but a request ")


async def test_a_broken_engine_that_begins_its_trial_well_rests_longer_after_it():
    """The first event of a stream does not show that the engine ends any."""
    now = [0.0]
    router = fleet(decode=breaking_engine(ENDS["stream breaks off"]), clock=lambda: now[0])
    life = router.registry.get("decode-0").life
    rests = []
    for _ in range(3):
        while life.state is not HealthState.EJECTED:
            await router.serve()
        rests.append(life.serves_in_s(now=now[0]))
        now[0] += rests[-1]
        assert life.may_serve(now=now[0])

    assert rests == [5.0, 10.0, 20.0]


async def test_a_stream_that_no_engine_ends_is_held_against_the_last_one_alone():
    """The others may have broken off because of the request, as the last one may: one failure for one request."""

    async def side(leg):
        return 200, [*list(events(json.loads(leg.body), name="cmpl-r"))[:3], BREAK]

    router = fleet(decode=side, resume_streams=True, breaking=Settings(circuit_breaker_failures=1))
    client = await router.serve(call(stream=True, temperature=0, max_tokens=12))
    away = [m.instance.id for m in router.registry.members() if m.life.state is HealthState.EJECTED]

    assert len(client.record.retries) == 2
    assert away == [client.record.decode.instance]


async def test_what_an_engine_says_in_its_stream_is_no_break():
    """It may be the request: the table has it held if another engine has served the same."""
    said = (200, [EVENT, b"data: " + ERROR + b"\n\n", DONE])
    router = fleet(decode=breaking_engine(said), retries=2)
    for _ in range(60):
        await router.serve()

    assert states(router) == {HealthState.HEALTHY}


async def test_clients_that_leave_in_the_middle_of_streams_say_nothing_of_the_engine():
    """Neither that its streams end well nor that they break off."""
    router = fleet(decode=breaking_engine(ENDS["stream breaks off"]), y=2)
    left = []

    async def side(leg):
        if leg.instance.id == "decode-0" and "leaves" in str(prompt_of(leg)):
            return 200, [EVENT, never()]
        return await breaking_engine(ENDS["stream breaks off"])(leg)

    router.sender.decode = side
    life = router.registry.get("decode-0").life
    for _ in range(5):
        for _ in range(2):
            await router.serve()
            client = router.start(Asked("/v1/completions", b'{"prompt":"leaves"}'))
            await settle()
            client.hang_up()
            left.append(await client.end())

    assert left
    assert life.state is HealthState.EJECTED


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT])
async def test_a_prefill_engine_that_does_not_name_its_model_is_not_at_fault(api):
    """The router cannot tell whether a decode engine serves the same one: it serves the request alone."""

    async def unused(leg, *, timeout_s):
        return EngineResponse(200, JSON, b"{}")

    router = fleet(asks_for_models=True, x=2)
    router.sender.post = unused
    for number in range(12):
        client = await router.serve(call(api), f"r{number}")
        assert (client.status, client.record.decode is None) == (200, False)
        assert {retry.reason for retry in client.record.retries} == {Failure.NO_KV_PARAMS}

    assert states(router) == {HealthState.HEALTHY}
