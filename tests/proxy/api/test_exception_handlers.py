"""Errors as clients see them."""

import inspect
import json

import httpx
import pytest
from fastapi import FastAPI, HTTPException

from pdrelay_proxy import errors
from pdrelay_proxy.api import exception_handlers
from pdrelay_proxy.api.request_context import RequestContextMiddleware
from pdrelay_proxy.core.model import RequestId
from pdrelay_proxy.requests.error_body import error_answer

RAISED = {
    errors.BadRequest("b", param="n"): (400, "BadRequestError"),
    errors.BadFraming("two Host headers", param="n"): (400, "BadRequestError"),
    errors.HeadTooLarge("h"): (431, "RequestHeadTooLargeError"),
    errors.UriTooLong("u"): (414, "UriTooLongError"),
    errors.NotServed("CONNECT"): (501, "NotImplementedError"),
    errors.TooSlow("s"): (408, "RequestTimeoutError"),
    errors.TooManyConnections("c", retry_after_s=5): (503, "ServiceUnavailableError"),
    errors.BodyTooLarge("l"): (413, "RequestTooLargeError"),
    errors.UnsupportedCoding("c"): (415, "UnsupportedMediaTypeError"),
    errors.UnsupportedMedia("m"): (415, "UnsupportedMediaTypeError"),
    errors.PathNotServed("p"): (404, "NotFoundError"),
    errors.UnknownModel("m"): (404, "NotFoundError"),
    errors.Misdirected("h"): (421, "MisdirectedRequestError"),
    errors.CrossSite("s"): (403, "PermissionDeniedError"),
    errors.EngineBusy("b"): (503, "ServiceUnavailableError"),
    errors.NoInstance("i"): (503, "ServiceUnavailableError"),
    errors.NoMatchingInstance("m"): (503, "ServiceUnavailableError"),
    errors.EngineError("e"): (502, "EngineError"),
    errors.EngineFault("f"): (502, "EngineError"),
    errors.Moved("prefill-0 is another"): (502, "EngineError"),
    errors.NoKvParams("n"): (502, "EngineError"),
    errors.NoModelName("m"): (502, "EngineError"),
    errors.KeyRefused("k"): (502, "EngineError"),
    errors.AnswerRefused("a"): (502, "EngineError"),
    errors.ConnectionStale("c"): (502, "EngineError"),
    errors.NetworkFault("n"): (502, "EngineError"),
    errors.RouterLacks("r"): (503, "ServiceUnavailableError"),
    errors.EngineTimeout("t"): (504, "EngineTimeoutError"),
    errors.OutOfTime("o"): (504, "RequestTimeoutError"),
    errors.Unauthorized("u"): (401, "AuthenticationError"),
    errors.KeyOverLimit("k", retry_after_s=1): (429, "RateLimitError"),
    errors.RouterFull("f", retry_after_s=1): (503, "ServiceUnavailableError"),
    errors.ClosingDown("c", retry_after_s=1): (503, "ServiceUnavailableError"),
}


@pytest.mark.parametrize(("error", "expected"), RAISED.items(), ids=lambda item: type(item).__name__)
def test_every_error_has_a_status_and_a_kind(error, expected):
    """In the shape, and with the code, that vLLM uses itself."""
    answer = error_answer(error, "/v1/completions")

    param = "model" if isinstance(error, errors.UnknownModel) else getattr(error, "param", None)
    assert (answer.status, json.loads(answer.body)) == (
        expected[0],
        {"error": {"message": str(error), "type": expected[1], "param": param, "code": expected[0]}},
    )


def test_the_text_of_a_bug_stays_in_the_log():
    """It may hold anything, addresses and bodies included."""
    answer = error_answer(KeyError("http://10.0.0.1:8100"), "/v1/messages")

    assert answer.status == 500
    assert b"10.0.0.1" not in answer.body


def test_errors_that_clients_never_see_are_accounted_for():
    """A new error must get its status, or its place in this list."""
    inside = {errors.ProxyError, errors.ClientError, errors.Refused, errors.TurnedAway, errors.ConfigError}
    inside |= {errors.NoSuchPath}  # an engine's words
    inside |= {errors.UnknownInstance}  # of the admin routes
    inside |= {errors.NotAccepted}  # in the log, and 400 in the demo's words
    inside |= {
        errors.AddressError,
        errors.BadPort,
        errors.NotAllowed,
        errors.AlreadyKnown,
        errors.CannotTurn,
    }  # told on the command line, or by /instances
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    every = {kind for kind in classes if issubclass(kind, Exception)}

    assert every == inside | {type(error) for error in RAISED}


def app_that_raises(error):
    app = FastAPI(redirect_slashes=False)  # as the router's
    exception_handlers.install(app)
    named = {"new_id": lambda: RequestId("pdrelay-1"), "clock": lambda: 0.0, "request_over": lambda _: None}
    app.add_middleware(RequestContextMiddleware, **named)

    async def fail():
        raise error

    for path in ("/v1/x", "/v1/messages", "/status", "/elsewhere"):
        app.get(path)(fail)
    return app


async def get(error, path):
    transport = httpx.ASGITransport(app_that_raises(error), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.get(path)


async def test_a_refusal_is_not_reworded():
    """Status, type and bytes are the engine's."""
    words = b'{ "error": {"message": "short and stout"} }'
    response = await get(errors.Refused(418, "application/json; charset=x", words), "/v1/x")

    assert (response.status_code, response.content) == (418, words)
    assert response.headers["content-type"] == "application/json; charset=x"


async def test_a_bug_is_a_500_that_can_be_found_again():
    """The id is in the answer as well as in the log."""
    response = await get(KeyError("x"), "/v1/x")

    assert response.status_code == 500
    assert response.headers["x-request-id"] == "pdrelay-1"
    assert response.json()["error"]["type"] == "InternalServerError"
    assert "x-request-id" not in (await get(KeyError("x"), "/elsewhere")).headers


async def test_errors_of_the_framework_are_shaped_too():
    """All but those of the admin routes, whose clients expect FastAPI's own format."""
    error = HTTPException(400, "with {braces}")

    assert (await get(error, "/v1/x")).json()["error"]["message"] == "GET /v1/x: with {braces}"
    assert (await get(error, "/status")).json() == {"detail": "with {braces}"}


ANTHROPICS = {
    errors.NoInstance("no engine"): (503, "overloaded_error", "no engine"),
    errors.Unauthorized("no key"): (401, "authentication_error", "no key"),
    errors.Refused(400, "application/json", b'{"detail": "no"}'): (400, "invalid_request_error", "no"),
    HTTPException(405, "Method Not Allowed"): (405, "invalid_request_error", "GET /v1/messages: Method Not Allowed"),
    KeyError("x"): (500, "api_error", "The router failed; its log says why."),
}


@pytest.mark.parametrize(("error", "expected"), ANTHROPICS.items(), ids=lambda item: type(item).__name__)
async def test_errors_at_the_messages_api_have_its_shape(error, expected):
    """Whoever makes them: the router, an engine, the framework, a bug."""
    response = await get(error, "/v1/messages")

    status, kind, message = expected
    assert response.headers["content-type"] == "application/json"
    assert (response.status_code, response.json()) == (
        status,
        {"type": "error", "error": {"type": kind, "message": message}},
    )


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/x/", "/v1/x"),
        ("/v1/messages//?a=b%20c", "/v1/messages?a=b%20c"),
        ("/elsewhere/", "/elsewhere"),
        ("/status/", "/status"),
        ("/v1/y/", None),
        ("//elsewhere.example/", None),
        ("/", None),
        ("//", None),
    ],
)
async def test_a_slash_at_the_end_of_a_path_leads_to_the_route(path, place):
    """With the method and the body, as FastAPI does it in vLLM; to no other host."""
    response = await get(errors.NoInstance("no"), path)

    assert (response.status_code, response.headers.get("location")) == (404 if place is None else 307, place)


async def test_errors_of_the_router_at_a_path_for_operators_have_the_shape_of_the_others_there():
    """The document has one."""
    assert (await get(errors.CrossSite("no"), "/status")).json() == {"detail": "no"}
