"""Sending a request again, whoever moves the KV cache."""

import json

import pytest

from pdrelay_proxy.core.model import Api, EngineResponse, Role
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.server_timing import server_timing
from pdrelay_proxy.errors import (
    AnswerRefused,
    ConnectionStale,
    EngineError,
    EngineTimeout,
    NetworkFault,
    RouterLacks,
)
from pdrelay_proxy.settings import KvTransferMode
from support.scripted import (
    DONE,
    EVENT,
    Asked,
    Noted,
    Scripted,
    call,
    failing,
    good_decode,
    params_of,
    pulled_prefill,
    request_id,
    router_of,
)

ERROR = b'{"error":{"message":"no room","type":"x","param":null,"code":503}}'
UNREACHABLE = EngineError("it cannot be reached", reached=False)


async def served(engines, asked=None, **options):
    router = router_of(engines, **options)
    client = await router.serve(asked)
    assert not engines.open
    assert router.is_idle()
    return client


@pytest.mark.parametrize("outcome", [EngineError("broke off"), (500, [ERROR]), (503, [ERROR]), (200, [])])
async def test_after_a_decode_that_failed_there_is_a_new_prefill(outcome):
    """The decode engine may have freed the blocks of the first: its parameters are never sent twice."""
    engines = Scripted(pulled_prefill, failing(outcome, then=good_decode))
    client = await served(engines, y=2)

    assert client.body == EVENT + DONE
    assert [request_id(leg) for leg in engines.legs] == ["r", "r", "r-r1", "r-r1"]
    first, second = engines.of(Role.DECODE)
    assert first.instance.id != second.instance.id
    assert params_of(first)["remote_request_id"] != params_of(second)["remote_request_id"]
    said = {503: "busy", 500: "http_5xx"}.get(outcome[0] if isinstance(outcome, tuple) else 0, "bad_response")
    assert server_timing(client.record).startswith(f'retry;desc="{first.instance.id} {said}";dur=0.0, prefill;')


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_busy_is_asked_once_and_its_words_reach_the_client(status):
    """It has no room, and asking again would not make any; another engine may have some."""
    for role in Role:
        engines = Scripted(failing(EngineResponse(status, "application/json", ERROR), then=pulled_prefill), good_decode)
        if role is Role.DECODE:
            engines = Scripted(pulled_prefill, failing((status, [ERROR]), then=good_decode))
        notes = Noted()
        client = await served(engines, spans=notes, decode_only_fallback=False)
        assert [told[-1] for told in notes.told if told[0] == "ended"][-1] is Failure.BUSY
        assert client.status == status
        if (role, status) == (Role.PREFILL, 503):  # what its answer says may be about its insides
            said = "prefill-0 failed to prefill: it answered with status 503"
            assert client.error == ("ServiceUnavailableError", said)
        else:
            assert client.body == ERROR
        assert len(engines.of(role)) == 1


async def test_a_decode_engine_that_is_not_there_costs_no_prefill():
    """The parameters are still good: nobody has seen them."""
    engines = Scripted(pulled_prefill, failing(UNREACHABLE, then=good_decode))
    client = await served(engines, y=2)

    assert client.body == EVENT + DONE
    assert len(engines.of(Role.PREFILL)) == 1
    first, second = engines.of(Role.DECODE)
    assert (first.body, first.headers) == (second.body, second.headers)
    assert first.instance.id != second.instance.id
    assert client.record.prefill is not None


@pytest.mark.parametrize("role", Role)
async def test_there_is_an_end_to_it(role):
    """The client gets the last failure; every earlier one is in the header."""
    broken = [EngineError(f"failure {number}") for number in range(9)]
    prefill = failing(*broken, then=pulled_prefill) if role is Role.PREFILL else pulled_prefill
    decode = failing(*broken, then=good_decode) if role is Role.DECODE else good_decode
    engines = Scripted(prefill, decode)
    client = await served(engines, x=4, y=4, retries=2, decode_only_fallback=False)

    assert (client.status, client.error) == (502, ("EngineError", "failure 2"))
    assert len(engines.of(role)) == 3
    assert len({leg.instance.id for leg in engines.of(role)}) == 3
    assert len({request_id(leg) for leg in engines.of(role)}) == 3
    assert server_timing(client.record).count("retry;") == 2


@pytest.mark.parametrize("role", Role)
async def test_a_refusal_is_final(role):
    """And it is told in the engine's words."""
    refused = failing(EngineResponse(404, "application/json", ERROR), then=pulled_prefill)
    prefill = refused if role is Role.PREFILL else pulled_prefill
    decode = failing((404, [ERROR]), then=good_decode) if role is Role.DECODE else good_decode
    engines = Scripted(prefill, decode)
    client = await served(engines, x=2, y=2)

    assert (client.status, client.body) == (404, ERROR)
    assert len(engines.of(role)) == 1


async def test_a_request_for_one_engine_is_sent_again_too():
    """Nothing was shown; another engine gives the same text."""
    engines = Scripted(pulled_prefill, failing(EngineError("broke off"), UNREACHABLE, then=good_decode))
    client = await served(engines, call(n=2), x=0, y=3)

    assert client.body == EVENT + DONE
    assert len({leg.instance.id for leg in engines.legs}) == 3
    assert server_timing(client.record).count("retry;") == 2


NO_PARAMS = EngineResponse(200, "application/json", b'{"id":"x","kv_transfer_params":null}')
FULL = EngineResponse(503, "text/plain", b"full")
BROKEN = EngineResponse(500, "text/plain", b"broken")


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (UNREACHABLE, Failure.UNREACHABLE),
        (NetworkFault("no name"), Failure.NETWORK),
        (EngineError("broke off"), Failure.BAD_RESPONSE),
        (EngineTimeout("hangs"), Failure.TIMEOUT),
        (BROKEN, Failure.HTTP_5XX),
        (FULL, Failure.BUSY),
        (NO_PARAMS, Failure.NO_KV_PARAMS),
    ],
)
@pytest.mark.parametrize("mode", [KvTransferMode.AUTO, KvTransferMode.PUSH])
@pytest.mark.parametrize("api", list(Api))
async def test_without_another_prefill_engine_a_decode_engine_serves_alone(outcome, failure, mode, api):
    """The client is served, whatever has become of the only prefill engine, and the record says why."""
    engines = Scripted(failing(outcome, then=pulled_prefill), good_decode)
    fields = {"max_tokens": 9} if api is Api.MESSAGES else {"sampling_params": {}} if api is Api.GENERATE else {}
    client = await served(engines, call(api, **fields), mode=mode)

    assert (client.status, client.body) == (200, EVENT + DONE)
    assert [leg.instance.role for leg in engines.legs] == [Role.PREFILL, Role.DECODE]
    assert "kv_transfer_params" not in json.loads(engines.of(Role.DECODE)[0].body)
    timing = server_timing(client.record)
    assert timing.startswith(f'retry;desc="prefill-0 {failure}"')
    assert 'mode;desc="single", reason;desc="prefill_failed"' in timing


@pytest.mark.parametrize(
    "outcome",
    [
        EngineResponse(400, "application/json", ERROR),
        EngineResponse(404, "application/json", b'{"detail":"Not Found"}'),
        EngineResponse(401, "application/json", b'{"error":"Unauthorized"}'),
        RouterLacks("no descriptors"),
        AnswerRefused("too long"),
    ],
)
async def test_no_decode_engine_serves_alone_what_is_no_fault_of_the_prefill_engine(outcome):
    """The request is refused, or the router is at fault: one try."""
    engines = Scripted(failing(outcome, then=pulled_prefill), good_decode)
    client = await served(engines)

    assert client.status >= 400
    assert len(engines.legs) == 1


@pytest.mark.parametrize(("role", "asked"), [(Role.PREFILL, call()), (Role.DECODE, call()), (Role.DECODE, call(n=2))])
async def test_a_closed_idle_connection_is_not_a_retry_that_counts(role, asked):
    """The engine is well: it gets the request again, under another id, for it may have read it."""
    stale = ConnectionStale("closed")
    engines = Scripted(
        failing(stale, then=pulled_prefill) if role is Role.PREFILL else pulled_prefill,
        failing(stale, then=good_decode) if role is Role.DECODE else good_decode,
    )
    router = router_of(engines, retries=1)
    client = await router.serve(asked)

    assert client.body == EVENT + DONE
    assert not router.telemetry.counters.retries
    assert [request_id(leg) for leg in engines.of(role)] == ["r", "r-r1"]


@pytest.mark.parametrize("was_sent", [True, False])
@pytest.mark.parametrize(("role", "asked"), [(Role.PREFILL, call()), (Role.DECODE, call()), (Role.DECODE, call(n=2))])
async def test_without_retries_a_request_is_not_sent_twice_that_an_engine_may_have_read(role, asked, was_sent):
    """Operators who set 0 want no prompt to be computed twice; what has not left the router is none."""
    stale = ConnectionStale("closed", was_sent=was_sent)
    engines = Scripted(
        failing(stale, then=pulled_prefill) if role is Role.PREFILL else pulled_prefill,
        failing(stale, then=good_decode) if role is Role.DECODE else good_decode,
    )
    client = await served(engines, asked, retries=0)

    assert client.status == (502 if was_sent else 200)
    assert len(engines.of(role)) == (1 if was_sent else 2)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((404, [b'{"detail":"Not Found"}']), 404),
        ((405, [b'{"detail":"Method Not Allowed"}']), 405),
        ((403, [b"RBAC: access denied"], "text/plain"), 403),
        ((413, [b"<html></html>"], "text/html"), 413),
        ((404, [], ""), 404),
        ((422, [b'{"detail":[]}'], "application/json"), 422),
        ((501, [ERROR], "application/json"), 501),
    ],
)
async def test_what_the_client_has_done_wrong_costs_one_try_and_keeps_its_status(role, retries, answer, status):
    """And nothing is counted against the engine: the next one's mistake must not cost another's request."""
    engines = Scripted(
        failing(answer, then=pulled_prefill) if role is Role.PREFILL else pulled_prefill,
        failing(answer, then=good_decode) if role is Role.DECODE else good_decode,
    )
    router = router_of(engines, x=2, y=2, retries=retries)
    client = await router.serve()

    assert client.status == status
    assert client.error is not None
    assert len(engines.of(role)) == 1
    assert not router.telemetry.counters.retries


ONE_LEG = [path for path, kind in ENDPOINTS.items() if kind is EndpointKind.JSON]


@pytest.mark.parametrize("path", [*ONE_LEG, Api.COMPLETIONS.value])
async def test_a_path_that_no_engine_has_is_a_404_at_the_door(path):
    """Each engine is asked once; what they do have is served as before."""

    async def side(leg):
        return (404, [b'{"detail":"Not Found"}'], "application/json") if leg.path == path else await good_decode(leg)

    engines = Scripted(side if path == Api.COMPLETIONS.value else pulled_prefill, side)
    router = router_of(engines, x=2, y=3)
    asked = Asked(path, b'{"model":"m","input":"x","prompt":"hi","max_tokens":1}')
    clients = [await router.serve(asked) for _ in range(8)]

    assert [client.status for client in clients] == [404] * 8
    assert {client.error[0] for client in clients} < {"NotFoundError", "not_found_error"}
    assert clients[-1].error[1] == f"no engine here that serves the model has {path}"
    assert len(engines.of(Role.DECODE)) == 3
    assert (await router.serve(call(Api.CHAT, n=2))).status == 200
    assert {member.life.may_serve(now=0) for member in router.registry.members()} == {True}


async def test_engines_that_lack_a_path_leave_it_to_those_that_have_it():
    """One of them serves it from then on."""

    async def side(leg):
        return (404, [], "") if leg.instance.id == "decode-0" else (200, [b"{}"], "application/json")

    engines = Scripted(pulled_prefill, side)
    router = router_of(engines, y=2)
    clients = [await router.serve(Asked("/v1/embeddings", b'{"input":"x"}')) for _ in range(6)]

    assert [client.status for client in clients].count(404) <= 1
    assert clients[-1].status == 200


async def test_what_only_an_operator_can_mend_is_said_once(caplog):
    """Which key, and that a prefill engine sends no KV."""
    engines = Scripted(failing(NO_PARAMS, NO_PARAMS, then=pulled_prefill), failing(*[(401, [])] * 3, then=good_decode))
    router = router_of(engines)
    for _ in range(3):
        await router.serve(call(n=2))
    for _ in range(2):
        await router.serve()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert said == [
        "decode-0 wants another API key than this router shows to it (PDRELAY_DECODE_API_KEY)",
        "prefill-0 has answered without KV of the prompt (it keeps as much as it may, or has no connector that sends "
        "KV), or without its model's name where a request named none: another prefill engine, or a decode engine "
        "alone, serves such requests",
    ]
