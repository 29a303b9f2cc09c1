"""Sending a request again, whoever moves the KV cache."""

import pytest

from support.scripted import (
    DONE,
    EVENT,
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
from xpyd_proxy.core.model import EngineResponse, Role
from xpyd_proxy.core.protocol.fault_table import Failure
from xpyd_proxy.errors import EngineError

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
    assert client.record.server_timing().startswith(f'retry;desc="{first.instance.id} {said}";dur=0.0, prefill;')


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_busy_is_asked_once_and_its_words_reach_the_client(status):
    """It has no room, and asking again would not make any; another engine may have some."""
    for role in Role:
        engines = Scripted(failing(EngineResponse(status, "application/json", ERROR), then=pulled_prefill), good_decode)
        if role is Role.DECODE:
            engines = Scripted(pulled_prefill, failing((status, [ERROR]), then=good_decode))
        notes = Noted()
        client = await served(engines, spans=notes)
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
    client = await served(engines, x=4, y=4, retries=2)

    assert (client.status, client.error) == (502, ("EngineError", "failure 2"))
    assert len(engines.of(role)) == 3
    assert len({leg.instance.id for leg in engines.of(role)}) == 3
    assert len({request_id(leg) for leg in engines.of(role)}) == 3
    assert client.record.server_timing().count("retry;") == 2


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
    assert client.record.server_timing().count("retry;") == 2
