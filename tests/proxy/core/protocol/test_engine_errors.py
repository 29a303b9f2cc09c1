"""What an engine's answer means when it is not the one we hoped for."""

import pytest

from xpyd_proxy.core.model import EngineResponse, InstanceId
from xpyd_proxy.core.protocol.engine_errors import check_prefill, is_openai_error, refused_decode
from xpyd_proxy.errors import EngineBusy, EngineError, EngineFault, Refused

ERROR = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
ENGINE = InstanceId("prefill-3")


def test_a_good_prefill_passes():
    """Its parameters are looked at elsewhere."""
    check_prefill(ENGINE, EngineResponse(200, "application/json", b"{}"))


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 499])
def test_a_clients_mistake_is_told_in_the_engines_words(status):
    """Whatever their shape: the engine knows best what was wrong."""
    with pytest.raises(Refused) as caught:
        check_prefill(ENGINE, EngineResponse(status, "text/plain", b"no"))

    assert (status, "text/plain", b"no") == (caught.value.status, caught.value.content_type, caught.value.body)


@pytest.mark.parametrize("status", [204, 302, 500, 503])
def test_any_other_prefill_is_the_engines_fault(status):
    """Only 200 carries a prefilled prompt."""
    with pytest.raises(EngineError, match=f"prefill-3 .* status {status}"):
        check_prefill(ENGINE, EngineResponse(status, "application/json", ERROR))


@pytest.mark.parametrize("status", [429, 503])
def test_an_engine_without_room_says_so_in_any_words(status):
    """It may stand behind a proxy that answers in its place."""
    assert isinstance(refused_decode(ENGINE, EngineResponse(status, "text/plain", b"full")), EngineBusy)
    if status == 503:
        with pytest.raises(EngineBusy):
            check_prefill(ENGINE, EngineResponse(status, "text/plain", b"full"))


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, ERROR, Refused),
        (500, ERROR, Refused),
        (401, b'{"error":"Unauthorized"}', Refused),
        (404, b'{"detail":"Not Found"}', EngineFault),
        (502, b"<html>", EngineFault),
        (302, ERROR, EngineFault),
        (204, b"", EngineFault),
    ],
)
def test_a_decode_engines_error_reaches_the_client_if_it_can_read_it(status, body, kind):
    """An OpenAI client understands one shape of error."""
    assert kind is type(refused_decode(ENGINE, EngineResponse(status, "application/json", body)))


@pytest.mark.parametrize("body", [b"", b"[]", b'{"error":null}', b'{"error":7}', b'{"err', b"\xff"])
def test_other_bodies_are_no_openai_errors(body):
    """They are replaced by one that is."""
    assert not is_openai_error(body)
