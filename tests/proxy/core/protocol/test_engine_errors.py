"""What an engine's answer means when it is not the one we hoped for."""

import json

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.model import EngineResponse, Instance, InstanceId, Role
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS
from pdrelay_proxy.core.protocol.engine_errors import body_shape, leg_error, refusal, words_of
from pdrelay_proxy.core.protocol.fault_table import BodyShape, Failure, failure_of, failure_of_answer
from pdrelay_proxy.errors import EngineBusy, EngineError, EngineFault, KeyRefused, NoSuchPath, Refused
from pdrelay_proxy.requests.error_body import error_answer

ERROR = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
WORD = b'{"error":"Unauthorized"}'
DETAIL = b'{"detail":"Not Found"}'
FAULTS = b'{"detail":[{"loc":["body","input"],"msg":"Field required","type":"missing"}]}'
PAGE = b"<html><body>too large at 10.0.0.7</body></html>"
OF_SHAPE = {
    BodyShape.ERROR: ERROR,
    BodyShape.WORD: WORD,
    BodyShape.DETAIL: DETAIL,
    BodyShape.OTHER: PAGE,
    BodyShape.EMPTY: b"",
}


def engine(role):
    return Instance(InstanceId(f"{role}-3"), role, Address("http", "h", 1))


def answer(status, body):
    return EngineResponse(status, "text/html" if body is PAGE else "application/json", body)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        *((body, shape) for shape, body in OF_SHAPE.items()),
        (FAULTS, BodyShape.DETAIL),
        (b'{"type":"error","error":{"type":"not_found_error","message":"no"}}', BodyShape.ERROR),
        (b'{"object":"error","message":"no","type":"NotFoundError","code":404}', BodyShape.ERROR),
        *((body, BodyShape.OTHER) for body in (b"[]", b'{"error":null}', b'{"error":7}', b'{"err', b"\xff", b"no")),
        (b" \n", BodyShape.EMPTY),
    ],
)
def test_the_shape_of_a_body(body, shape):
    """An API's error is the engine's word on the request; anything else comes from what stands around it."""
    assert body_shape(body) is shape


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("shape", BodyShape)
def test_the_error_of_every_answer_is_what_the_table_says(role, shape):
    """On both legs, in each shape."""
    for status in (*range(201, 400, 7), *range(400, 600)):
        error = leg_error(engine(role), answer(status, OF_SHAPE[shape]))

        assert failure_of(error) is failure_of_answer(status, shape)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, ERROR, "no"),
        (404, DETAIL, "Not Found"),
        (405, b'{"detail":"Method Not Allowed"}', "Method Not Allowed"),
        (403, b"RBAC: access denied", None),
        (413, PAGE, None),
        (404, b"", None),
        (422, FAULTS, "body.input: Field required"),
        (501, ERROR, None),
    ],
)
def test_a_clients_mistake_keeps_its_status_and_takes_its_apis_shape(path, role, status, body, said):
    """A client of any API can read it, and learns nothing of a page that a mesh has put there."""
    error = leg_error(engine(role), answer(status, body))
    shown = error_answer(error, path)
    told = json.loads(shown.body)

    assert (shown.status, shown.content_type) == (status, "application/json")
    assert isinstance(error, Refused)
    assert ("type" in told) == path.startswith("/v1/messages")
    assert isinstance(told["error"]["message"], str)
    assert b"10.0.0.7" not in shown.body
    if said is not None:
        assert told["error"]["message"] == said


@pytest.mark.parametrize("status", [204, 302, 500, 503])
def test_any_other_prefill_is_the_engines_fault(status):
    """Only 200 carries a prefilled prompt, and what a 5xx says may be about the engine's insides."""
    error = leg_error(engine(Role.PREFILL), answer(status, ERROR))

    assert isinstance(error, EngineError)
    assert str(error) == f"prefill-3 failed to prefill: it answered with status {status}"


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("role", Role)
def test_an_engine_without_room_says_so_in_any_words(role, status):
    """It may stand behind a proxy that answers in its place."""
    assert isinstance(leg_error(engine(role), answer(status, b"full")), EngineBusy)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, ERROR, Refused),
        (500, ERROR, Refused),
        (401, WORD, KeyRefused),
        (401, ERROR, KeyRefused),
        (403, WORD, KeyRefused),
        (403, ERROR, Refused),
        (404, DETAIL, NoSuchPath),
        (404, ERROR, Refused),
        (502, b"<html>", EngineFault),
        (302, ERROR, EngineError),
        (204, b"", EngineError),
    ],
)
def test_a_decode_engines_error_reaches_the_client_if_it_is_about_the_request(status, body, kind):
    """A key that the router lacks is none of the client's business."""
    error = leg_error(engine(Role.DECODE), answer(status, body))

    assert kind is type(error)
    if kind is KeyRefused:
        assert str(error) == "decode-3 does not accept the key of this router"


def test_parameters_do_not_reach_the_client_in_an_error():
    """They name the memory of a prefill engine."""
    error = refusal("decode-3", 400, b'{"error":{"message":"no","kv_transfer_params":{"remote_host":"10.0.0.1"}}}')

    assert failure_of(error) is Failure.REFUSED
    assert error.body == b'{"error":{"message":"no"}}'


def test_the_message_of_an_error():
    """Of an error's body, as engines write it."""
    assert words_of(b'{"error":{"message":"too long","code":400}}') == "too long"
    assert words_of(b"<html>") is None
