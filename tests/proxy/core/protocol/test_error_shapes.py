"""Which shape an error has: that of the API at its path, whoever made it."""

import json

import pytest

from pdrelay_proxy.core.protocol.error_shapes import engine_text, error_event, error_text

OPENAI = {"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}
ANTHROPIC = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/", "/v1/messages/count_tokens", "/v1/messages/batches"])
@pytest.mark.parametrize("status", KINDS)
def test_an_error_of_the_messages_api_has_anthropics_shape_and_kind(path, status):
    """Its clients show no other message, and go by the kind."""
    said = json.loads(error_text(path, status, "why", kind="EngineError", param="n"))

    assert said == {"type": "error", "error": {"type": KINDS[status], "message": "why"}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messagesx", "/tokenize", "/nowhere", ""])
def test_other_errors_have_openais_shape(path):
    """Also where no API is."""
    assert json.loads(error_text(path, 400, "no", param="n")) == OPENAI


@pytest.mark.parametrize("path", ["/status", "/instances/add", "/requests/1"])
def test_errors_for_operators_have_fastapis_shape(path):
    """As the document says."""
    assert json.loads(error_text(path, 403, "no")) == {"detail": "no"}


WORDS = {
    "OpenAI's": (OPENAI, "no"),
    "Anthropic's": (ANTHROPIC, "no"),
    "vLLM's 401": ({"error": "Unauthorized"}, "Unauthorized"),
    "an older vLLM's": ({"object": "error", "message": "no", "type": "x", "code": 400}, "no"),
    "FastAPI's": ({"detail": "Not Found"}, "Not Found"),
    "FastAPI's list": ({"detail": [{"loc": ["body", "n"], "msg": "is wrong"}]}, "body.n: is wrong"),
    "FastAPI's list without places": ({"detail": [{"msg": "is wrong"}]}, "is wrong"),
    "another object": ({"a": 1}, None),
    "an odd detail": ({"detail": [1]}, None),
    "an error without words": ({"error": {"code": 3}}, None),
    "a list": ([], None),
    "HTML": (b"<html>413 Request Entity Too Large</html>", None),
    "nothing": (b"", None),
    "no text": (b"\xff\xfe", None),
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("words", WORDS)
def test_what_an_engine_says_gets_the_shape_of_the_api(path, words):
    """Unchanged, if it has that; else with its own sentence, if it has one."""
    body, sentence = WORDS[words]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    found = engine_text(path, 400, raw)

    own = "Anthropic's" if path == "/v1/messages" else "OpenAI's"
    assert (found is raw) is (words == own)
    said = json.loads(found)
    assert said["error"]["message"] == (sentence or "an engine refused the request with status 400")
    assert said.keys() == ({"type", "error"} if path == "/v1/messages" else {"error"})
    assert said["error"].keys() == ({"type", "message"} if path == "/v1/messages" else OPENAI["error"].keys())


def test_an_engines_words_are_bounded():
    """They may be a whole page."""
    assert len(engine_text("/v1/messages", 400, json.dumps({"detail": "x" * 100_000}).encode())) < 3000


def test_the_field_at_fault_stays_named():
    """In the shapes that have a place for it."""
    body = json.dumps(ANTHROPIC | {"error": ANTHROPIC["error"] | {"param": "n"}}).encode()

    assert json.loads(engine_text("/v1/completions", 400, body))["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"no"}}\n\n'),
        (
            "/v1/responses",
            b'event: error\ndata: {"type":"error","code":"EngineError","message":"no","param":null}\n\n',
        ),
        (
            "/v1/completions",
            b'data: {"error":{"message":"no","type":"EngineError","param":null,"code":502}}\n\n',
        ),
    ],
)
def test_a_stream_that_fails_says_so_in_the_words_of_its_api(path, expected):
    """Each library looks for its own sort of event."""
    assert error_event(path, 502, "no", kind="EngineError") == expected
